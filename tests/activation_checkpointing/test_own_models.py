"""Somebody's own model, whose parts are named from outside: not one bit may change."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from seg4k.activation_checkpointing import (
    Plan,
    apply_activation_checkpointing,
    describe_checkpointing,
    make_plan,
    remove_activation_checkpointing,
    segments_of,
)
from seg4k.activation_checkpointing.measure import measure_segments
from seg4k.errors import UserError
from tests.activation_checkpointing.test_describe import swin

smp = pytest.importorskip("segmentation_models_pytorch")
SIZE = 64


def unet():
    torch.manual_seed(0)
    return smp.Unet("resnet18", encoder_weights=None, decoder_channels=(32, 16, 16, 8, 8), classes=3).train()


def unet_segments(model):
    found = {f"encoder.stage{i}": getattr(model.encoder, f"layer{i + 1}") for i in range(4)}
    return found | {f"decoder.block{i}": block for i, block in enumerate(model.decoder.blocks)}


def swin_unet():
    torch.manual_seed(0)
    return smp.Unet(
        "tu-swin_tiny_patch4_window7_224",
        encoder_weights=None,
        decoder_channels=(32, 16, 16, 8, 8),
        classes=3,
        img_size=SIZE,
        embed_dim=16,
        depths=(2, 2, 2, 2),
        num_heads=(1, 2, 4, 8),
        window_size=2,
    ).train()


def swin_unet_segments(model):
    stages = [module for name, module in model.encoder.model.named_children() if name.startswith("layers_")]
    found = {}
    for s, stage in enumerate(stages):
        found[f"encoder.stage{s}"] = stage
        found |= {f"encoder.stage{s}.block{b}": block for b, block in enumerate(stage.blocks)}
    return found | {f"decoder.block{i}": block for i, block in enumerate(model.decoder.blocks)}


def classifier():
    torch.manual_seed(0)
    return swin(drop_path_rate=0.2)


def classifier_segments(model):
    found = {}
    for s, stage in enumerate(model.layers):
        found[f"encoder.stage{s}"] = stage
        found |= {f"encoder.stage{s}.block{b}": block for b, block in enumerate(stage.blocks)}
    return found


MODELS = {
    "smp.Unet, ResNet": (unet, unet_segments, ("stage", "decoder")),
    "smp.Unet, timm Swin": (swin_unet, swin_unet_segments, ("stage", "block", "encoder")),
    "timm Swin": (classifier, classifier_segments, ("stage", "block")),
}


def loss_of(output):
    """Cross-entropy for maps of logits, and anything that reaches all features otherwise."""
    if output.ndim == 4:
        mask = torch.randint(3, (2, SIZE, SIZE), generator=torch.Generator().manual_seed(2))
        return F.cross_entropy(output, mask)
    return output.square().mean()


def train(model, steps=3):
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model(torch.rand(2, 3, SIZE, SIZE, generator=generator)))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    gradients = {f"gradient {name}": p.grad for name, p in model.named_parameters()}
    return losses, {**dict(model.named_parameters()), **dict(model.named_buffers()), **gradients}


@pytest.mark.parametrize("which", MODELS)
def test_not_one_bit_changes(which):
    build, segments, modes = MODELS[which]
    plain = build()
    reference = copy.deepcopy(plain)
    losses, state = train(reference)
    for mode in modes:
        model = copy.deepcopy(plain)
        named = segments(model)
        apply_activation_checkpointing(model, make_plan(mode, list(named)), segments=named)
        their_losses, their_state = train(model)
        assert losses == their_losses, mode
        assert state.keys() == their_state.keys()
        for name, value in state.items():
            other = their_state[name]
            assert (value is None) == (other is None), (mode, name)
            assert value is None or torch.equal(value, other), (mode, name)


@pytest.mark.parametrize("which", MODELS)
def test_it_saves_memory_and_recomputes_what_was_named(which):
    build, segments, _ = MODELS[which]
    model = build()
    named = segments(model)
    plan = make_plan("stage", list(named))
    apply_activation_checkpointing(model, plan, segments=named)
    image = torch.rand(2, 3, SIZE, SIZE)
    kept = measure_segments(model, image, loss_fn=loss_of)
    measured = measure_segments(model, image, loss_fn=loss_of, plan=plan)
    assert measured.saved_bytes < 0.7 * kept.saved_bytes
    assert [name for name, s in measured.segments.items() if s.recomputations] == list(plan)
    assert len(describe_checkpointing(model, image).regions) == len(plan)


def test_names_travel_with_copies_and_pickles():
    model = unet()
    apply_activation_checkpointing(model, Plan(), segments=unet_segments(model))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        found = segments_of(other)
        assert list(found) == list(unet_segments(model))
        assert found["encoder.stage0"] is other.encoder.layer1
    assert model.state_dict().keys() == unet().state_dict().keys()
    remove_activation_checkpointing(model)
    apply_activation_checkpointing(model, Plan({"encoder.stage1": "recompute"}))  # the model keeps its names


def test_what_cannot_be_a_segment_is_refused():
    model, other = unet(), unet()
    with pytest.raises(UserError, match=r"has no method segments\(\).*segments={...}"):
        apply_activation_checkpointing(model, Plan())
    with pytest.raises(UserError, match="segment a is no module of this Unet"):
        apply_activation_checkpointing(model, Plan(), segments={"a": other.encoder.layer1})
    with pytest.raises(
        UserError, match=r"segment a is a ModuleList \(decoder.blocks\), which no model calls"
    ):
        apply_activation_checkpointing(model, Plan(), segments={"a": model.decoder.blocks})
    layer = model.encoder.layer1
    with pytest.raises(UserError, match="segment b is the same module as a"):
        apply_activation_checkpointing(model, Plan(), segments={"a": layer, "b": layer})
    assert not isinstance(getattr(model, "segments", None), nn.Module)
