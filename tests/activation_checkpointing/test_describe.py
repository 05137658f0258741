"""Which granularity is in force, held against what each library is known to do."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from seg4k.activation_checkpointing import (
    apply_activation_checkpointing,
    describe_checkpointing,
    make_plan,
)
from seg4k.activation_checkpointing.granularity import blocks_of, granularity_of

timm = pytest.importorskip("timm")
IMAGE = torch.rand(1, 3, 64, 64)


def vit():
    return timm.create_model("test_vit", img_size=64, num_classes=0).train()


def swin(**options):
    sizes = {"img_size": 64, "embed_dim": 16, "depths": (2, 2, 2), "num_heads": (1, 2, 4), "window_size": 4}
    return timm.create_model("swin_tiny_patch4_window7_224", num_classes=0, **sizes, **options).train()


def both(model, *inputs):
    """The description by switches and the one by a forward pass, which must agree on modules."""
    static, seen = describe_checkpointing(model), describe_checkpointing(model, *inputs)
    assert not static.observed
    assert seen.observed
    assert [r.modules for r in static.regions] == [r.modules for r in seen.regions]
    assert static.counts == seen.counts
    assert [r.by for r in static.regions] == [r.by for r in seen.regions]
    assert all(region.calls == 1 for region in seen.regions)
    return seen


def test_nothing():
    assert both(vit(), IMAGE).regions == ()
    assert "nothing is recomputed" in str(describe_checkpointing(vit()))
    assert describe_checkpointing(vit()).granularity is None


def test_timm_vit_recomputes_each_block():
    model = vit()
    model.set_grad_checkpointing()
    told = both(model, IMAGE)
    assert [r.modules for r in told.regions] == [(f"blocks.{i}",) for i in range(len(model.blocks))]
    assert told.granularity == "block"
    assert told.blocks == len(model.blocks)
    assert {r.use_reentrant for r in told.regions} == {False}
    assert f"{len(model.blocks)} x Block: blocks.0 ..." in str(told)


def test_timm_swin_recomputes_each_block_of_each_stage():
    model = swin()
    model.set_grad_checkpointing()
    told = both(model, IMAGE)
    assert told.counts == {"block": 6}
    assert told.regions[2].modules == ("layers.1.blocks.0",)


def test_the_same_switch_on_features_only_means_whole_stages_but_first_and_last():
    model = swin(features_only=True)
    model.set_grad_checkpointing()
    told = both(model, IMAGE)
    assert told.counts == {"blocks": 2}
    assert [r.modules for r in told.regions] == [("layers_0",), ("layers_1",)]
    assert told.granularity == "blocks"


@pytest.mark.parametrize("name", ["regnetx_002", "densenet121"])
def test_a_switch_that_tells_no_parts_is_not_called_nothing(name):
    model = timm.create_model(name).train()
    assert "nothing is recomputed" in str(describe_checkpointing(model))
    model.set_grad_checkpointing()
    said = str(describe_checkpointing(model))
    assert "nothing is recomputed" not in said
    assert "a switch is on" in said
    assert "give inputs to see it run" in said
    seen = describe_checkpointing(model, torch.rand(2, 3, 64, 64))
    assert seen.regions
    assert "a switch is on" not in str(seen)


def test_torch_wrapper_around_layers():
    model = vit()
    for block in model.blocks:
        block.attn, block.mlp = checkpoint_wrapper(block.attn), checkpoint_wrapper(block.mlp)
    told = both(model, IMAGE)
    assert told.granularity == "layer"
    assert told.counts == {"layer": 2 * len(model.blocks)}
    assert {r.by for r in told.regions} == {"CheckpointWrapper"}
    assert told.regions[0].modules == ("blocks.0.attn",)
    assert told.regions[0].kinds == ("Attention",)


def test_reentrant_is_noted():
    model = vit()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block, checkpoint_impl=CheckpointImpl.REENTRANT)
    told = both(model, IMAGE)
    assert told.granularity == "block"
    assert {r.use_reentrant for r in told.regions} == {True}
    assert any("use_reentrant=True" in note for note in told.notes)


class ByHand(nn.Module):
    """A model that calls `checkpoint` itself, in ways that people do."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)) for _ in range(4)
        )

    def forward(self, x):
        if self.how == "two at a time":
            for first in (0, 2):
                x = checkpoint(
                    lambda x, i=first: self.blocks[i + 1](self.blocks[i](x)), x, use_reentrant=False
                )
        elif self.how == "method":
            x = checkpoint(self.all_of_it, x, use_reentrant=False)
        elif self.how == "nested":
            for block in self.blocks:
                x = checkpoint(
                    lambda x, b=block: checkpoint(b, x, use_reentrant=False), x, use_reentrant=False
                )
        elif self.how == "shared":
            for _ in range(3):
                x = checkpoint(self.blocks[0], x, use_reentrant=False)
        return x

    def all_of_it(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize(
    ("how", "counts", "first"),
    [
        ("two at a time", {"blocks": 2}, ("blocks.0", "blocks.1")),
        ("method", {"model": 1}, ("",)),
        ("nested", {"block": 8}, ("blocks.0",)),
        ("shared", {"block": 1}, ("blocks.0",)),
    ],
)
def test_calls_in_a_models_own_code_are_seen(how, counts, first):
    told = describe_checkpointing(ByHand(how), torch.rand(2, 4))
    assert told.counts == counts
    assert told.regions[0].modules == first
    assert {r.by for r in told.regions} == {"torch.utils.checkpoint"}
    assert [r.nested for r in told.regions] == (
        [False, True] * 4 if how == "nested" else [False] * len(told.regions)
    )
    assert told.regions[0].calls == (3 if how == "shared" else 1)
    assert describe_checkpointing(ByHand(how)).regions == ()


def test_a_forward_pass_to_look_at_leaves_no_trace():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.ReLU()).eval()
    model[2].train()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    told = describe_checkpointing(model, IMAGE)
    assert any("eval mode" in note for note in told.notes)
    assert [m.training for m in model.modules()] == [False, False, False, True, False]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert not model[0]._forward_hooks
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_a_switch_that_nothing_obeys_is_noted():
    class Deaf(ByHand):
        gradient_checkpointing = True

        def forward(self, x):
            return self.all_of_it(x)

    told = describe_checkpointing(Deaf(None), torch.rand(2, 4))
    assert told.regions == ()
    assert any("none was recomputed" in note for note in told.notes)


COUNTS = {
    "none": {},
    "stage": {"blocks": 4, "other": 4, "block": 4},
    "block": {"block": 12, "other": 4},
    "layer": {"layer": 24, "other": 5},
    "encoder": {"blocks": 4},
    "decoder": {"block": 4, "other": 4},
    "selective": {"blocks": 4, "other": 4, "block": 4},
}


@pytest.mark.parametrize("mode", COUNTS)
def test_vit_unet_in_every_mode(mode):
    from seg4k.models.vit_unet import build_model

    config = {
        "encoder": {"name": "test_vit2", "weights": "random"},
        "decoder": {"channels": [16, 16, 8, 8], "norm": "batch"},
        "head": {"stride": 1},
    }
    model = build_model(config, num_classes=3, image_size=(64, 64)).train()
    plan = make_plan(mode, list(model.segments()))
    apply_activation_checkpointing(model, plan)
    told = both(model, IMAGE)
    assert len(told.regions) == len(plan)
    assert told.counts == COUNTS[mode]
    assert {r.by for r in told.regions} <= {"seg4k"}
    assert {r.selective for r in told.regions if r.granularity == "blocks"} <= {mode == "selective"}
    assert all(r.use_reentrant is False for r in told.regions)


def test_a_run_of_blocks(toy):
    model = toy()
    apply_activation_checkpointing(
        model, make_plan("block", list(model.segments()), blocks_per_segment=2), audit="off"
    )
    told = both(model, torch.rand(2, 3, 16, 16))
    assert ("stages.0.0", "stages.0.1") in [r.modules for r in told.regions]


def test_smp_unet_with_a_timm_encoder():
    smp = pytest.importorskip("segmentation_models_pytorch")
    model = smp.Unet("tu-test_convnext", encoder_weights=None, classes=3).train()
    assert both(model, IMAGE).regions == ()
    model.encoder.model.set_grad_checkpointing()
    told = both(model, IMAGE)
    assert told.granularity in ("blocks", "block")
    assert all(name.startswith("encoder.model.") for r in told.regions for name in r.modules)


# Its newer releases call the same switch activation_checkpointing_enable.
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_.*able. is deprecated:FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True])
def test_hugging_face_layers_are_whole_blocks(reentrant):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
    model = transformers.ViTModel(
        transformers.ViTConfig(image_size=64, patch_size=16, **sizes), add_pooling_layer=False
    ).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    told = both(model, IMAGE)
    assert told.counts == {"block": 3}
    assert told.blocks == 3
    assert {r.by for r in told.regions} == {"gradient_checkpointing"}
    assert {r.use_reentrant for r in told.regions} == {reentrant}
    model.gradient_checkpointing_disable()
    assert both(model, IMAGE).regions == ()


def test_blocks_by_structure():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.conv2 = nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1)

    stages = nn.Sequential(*(nn.Sequential(*(Block() for _ in range(n))) for n in (1, 2)))
    model = nn.ModuleDict({"stem": nn.Conv2d(2, 2, 1), "stages": stages})
    blocks = blocks_of(model)
    assert blocks == ["stages.0.0", "stages.1.0", "stages.1.1"]
    assert granularity_of(["stages.0"], blocks) == "block"
    assert granularity_of(["stages.1"], blocks) == "blocks"
    assert granularity_of(["stages"], blocks) == "model"
    assert granularity_of(["stages.1.0.conv1"], blocks) == "layer"
    assert granularity_of(["stem"], blocks) == "other"
    assert granularity_of([], blocks) == "other"
