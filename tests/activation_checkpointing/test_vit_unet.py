"""The model that is trained, under every plan."""

import copy

import pytest
import torch

from seg4k.activation_checkpointing import (
    ActivationCheckpointingError,
    Plan,
    activation_checkpointing,
    apply_activation_checkpointing,
    make_plan,
)
from seg4k.activation_checkpointing.measure import measure_segments, predict_recompute_flops
from seg4k.models.encoder import build_encoder
from seg4k.models.vit_unet import ViTUNet

MODES = ("stage", "block", "layer", "encoder", "decoder", "selective")


def vit_unet(name="test_vit", norm="batch", dropout=0.0, frozen="none"):
    torch.manual_seed(0)
    encoder = build_encoder(
        name,
        weights="random",
        image_size=(64, 64),
        in_channels=3,
        frozen=frozen,
        drop_path=dropout,
        dropout=dropout,
    )
    return ViTUNet(encoder, 5, decoder_channels=(16, 16, 8, 8), norm=norm).train()


def plans(model):
    names = list(model.segments())
    yield from ((mode, make_plan(mode, names)) for mode in MODES)
    yield "blocks by two", make_plan("block", names, blocks_per_segment=2)
    yield "offload", Plan(dict.fromkeys(make_plan("stage", names), "offload"))
    last = {"encoder.stage*": "selective", "decoder.block*": "recompute", "decoder.block3": "keep"}
    yield "last block in two", make_plan("plan", names, segments={**last, "decoder.block3.*": "recompute"})


@pytest.mark.parametrize(
    ("options", "training"),
    [
        ({}, {}),
        ({"dropout": 0.2, "norm": "group"}, {"precision": "bf16", "accumulate": 2}),
        ({"dropout": 0.2, "frozen": "all"}, {"precision": "fp16"}),
        ({"frozen": 2}, {"precision": "bf16"}),
        ({"name": "eva02_tiny_patch14_224", "dropout": 0.1}, {"batch": 1}),
    ],
)
def test_every_plan_leaves_the_same_bits(options, training, train):
    model = vit_unet(**options)
    plain = train(copy.deepcopy(model), size=64, **training)
    for mode, plan in plans(model):
        under_plan = copy.deepcopy(model)
        apply_activation_checkpointing(under_plan, plan, audit="off" if training else "first_step")
        assert train(under_plan, size=64, **training).differences(plain) == [], mode


def test_recomputed_operations_are_those_that_the_plan_predicts():
    model = vit_unet()
    image = torch.rand(1, 3, 64, 64)
    baseline = measure_segments(model, image, loss_fn=lambda logits: logits.square().mean())
    for mode, plan in plans(model):
        measured = measure_segments(model, image, loss_fn=lambda logits: logits.square().mean(), plan=plan)
        found = {name: measured.segments[name].recompute_flops for name in plan.recomputed()}
        assert found == predict_recompute_flops(baseline, plan), mode
        assert measured.forward_flops == baseline.forward_flops
        assert measured.backward_flops == baseline.backward_flops + sum(found.values())


def test_memory_saved_falls_in_order():
    model = vit_unet()
    image = torch.rand(1, 3, 64, 64)
    names = list(model.segments())

    def saved(plan):
        return measure_segments(
            model, image, loss_fn=lambda logits: logits.square().mean(), plan=plan
        ).saved_bytes

    none, selective, stage = (saved(make_plan(mode, names)) for mode in ("none", "selective", "stage"))
    offload = saved(Plan(dict.fromkeys(make_plan("stage", names), "offload")))
    assert none > 2 * selective
    assert selective > stage > offload


def test_the_segments_of_the_model_are_named_in_the_error():
    model = vit_unet()

    plan = make_plan("stage", list(model.segments()))
    with activation_checkpointing(model, plan):
        skips = []
        model.decoder["block1"].register_forward_pre_hook(lambda _, args: skips.append(args[-1]))
        loss = model(torch.rand(1, 3, 64, 64)).sum()
        skips[0].add_(1)
        with pytest.raises(ActivationCheckpointingError, match=r"segment decoder\.block1: its input 2 of 2"):
            loss.backward()
