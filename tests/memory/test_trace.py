import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from seg4k.activation_checkpointing.apply import apply_activation_checkpointing
from seg4k.activation_checkpointing.modes import make_plan
from seg4k.activation_checkpointing.plan import Plan
from seg4k.errors import UserError
from seg4k.memory.cuda_rules import cuda_rules
from seg4k.memory.ledger import measure_cpu_peak
from seg4k.memory.step import Step, autocast
from seg4k.memory.trace import trace
from seg4k.memory.traced import KINDS


def run(step, plan=None):
    """The step's own loop on real tensors, for the ledger."""
    model = step.model
    if plan is not None:
        apply_activation_checkpointing(model, plan, audit="off")
    model.train()
    optimizer, batch = step.optimizer(model), step.make_batch()

    def once():
        for index in range(step.accumulate):
            with autocast(step.precision):
                loss = step.loss(model, batch) / step.accumulate
            if index == 0 and step.zero_grad == "before_backward":
                optimizer.zero_grad()
            loss.backward()
        if step.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), step.clip)
        optimizer.step()
        if step.zero_grad == "after_step":
            optimizer.zero_grad()

    return once, [model, optimizer, batch]


@pytest.mark.parametrize("zero_grad", ["before_backward", "after_step"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_linear_layers_to_the_byte(builders, zero_grad, accumulate):
    options = {"zero_grad": zero_grad, "accumulate": accumulate}
    once, roots = run(builders.chain(**options))
    measured = measure_cpu_peak(once, roots=roots)
    traced = trace(builders.chain(**options), rules="cpu")
    assert traced.peak_bytes == pytest.approx(measured, abs=64)  # scalars


def test_linear_layers_against_closed_form(builders):
    width, rows = 128, 32
    traced = trace(builders.chain(width, 3, rows, zero_grad="after_step"), rules="cpu")
    weight, activation = 4 * width * width, 4 * rows * width
    # When the first layer's backward makes its weight's gradient, all others are there, and the gradient that
    # came in; the input is the batch.
    assert traced.peak_bytes == pytest.approx(6 * weight + 2 * activation, abs=64)
    assert traced.peak_at == "layer0 backward"
    assert traced.static_bytes == 6 * weight
    assert traced.segments["layer1"].saved_bytes == activation
    assert traced.flops("forward") == 3 * 2 * rows * width * width
    assert traced.flops("backward") == (3 + 2) * 2 * rows * width * width
    assert traced.flops("recompute") == 0


@pytest.mark.parametrize("mode", ["none", "stage", "selective"])
def test_vit_unet_against_the_ledger(builders, mode):
    size = (96, 128)
    real = builders.vit_unet(size, device="cpu", precision="fp32")
    plan = make_plan(mode, list(real.model.segments()))
    once, roots = run(real, plan)
    measured = measure_cpu_peak(once, roots=roots)
    traced = trace(builders.vit_unet(size, precision="fp32"), plan, rules="cpu")
    assert -0.01 <= traced.peak_bytes / measured - 1 <= 0.03


class CutRows(torch.nn.Module):
    """A convolution of rows that are cut out of features, which PyTorch copies to have them in one piece."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Conv2d(3, 16, 1), torch.nn.Conv2d(16, 16, 3, padding=1)

    def segments(self):
        return {"first": self.first, "second": self.second}

    def forward(self, x):
        return self.second(self.first(x)[:, :, 8:-8])


def cut_rows():
    return Step(
        CutRows(),
        lambda model, batch: model(batch["x"]).sum(),
        lambda model: torch.optim.SGD(model.parameters()),
        {"x": ((2, 3, 256, 256), torch.float32)},
        precision="fp32",
    )


def test_a_convolution_copies_rows_that_are_cut_out():
    once, roots = run(cut_rows())
    measured = measure_cpu_peak(once, roots=roots)
    assert trace(cut_rows(), rules="cpu").peak_bytes == pytest.approx(measured, rel=0.001)
    assert trace(cut_rows(), rules="cuda").peak_kinds["library"] > 0


def test_strips_of_features_against_the_ledger(builders):
    size, more = (256, 256), {"strips": 2, "precision": "fp32"}
    once, roots = run(builders.vit_unet(size, device="cpu", **more))
    measured = measure_cpu_peak(once, roots=roots)
    traced = trace(builders.vit_unet(size, **more), rules="cpu")
    assert -0.01 <= traced.peak_bytes / measured - 1 <= 0.03


def test_peak_is_made_of_its_kinds(builders):
    for rules in ("cuda", "cpu"):
        traced = trace(builders.vit_unet((128, 128)), rules=rules)
        assert tuple(traced.peak_kinds) == KINDS
        assert sum(traced.peak_kinds.values()) == traced.peak_bytes == max(traced.live)
        assert traced.peak_kinds["optimizer"] >= 2 * traced.peak_kinds["parameters"] * 0.9
    single = builders.vit_unet((128, 128), precision="fp32")
    assert trace(single, rules="cuda").peak_kinds["library"] == 0
    assert trace(single, rules="cpu").peak_kinds["library"] > 0


def test_recomputing_segments_lowers_the_peak_and_adds_their_forward(builders):
    step = builders.vit_unet((128, 128))
    plain = trace(step)
    plan = make_plan("stage", list(step.model.segments()))
    recomputed = trace(step, plan)
    assert recomputed.peak_bytes < plain.peak_bytes
    assert recomputed.flops("forward") == plain.flops("forward")
    assert recomputed.flops("backward") == plain.flops("backward")
    name = "encoder.stage1"
    assert plain.segments[name].flops("recompute") == 0
    # All but the last product, whose result nothing saves.
    assert 0.7 < recomputed.segments[name].flops("recompute") / plain.segments[name].flops("forward") <= 1
    assert recomputed.segments[name].saved_bytes < plain.segments[name].saved_bytes


def test_flops_are_those_of_torchs_counter(builders):
    step = builders.vit_unet(device="cpu", precision="fp32")
    once, _ = run(step)
    with FlopCounterMode(display=False) as counter:
        once()
    traced = trace(builders.vit_unet(precision="fp32"), rules="cpu")
    # torch's table lacks the CPU's attention.
    attention = sum(
        operation.flops * times
        for segment in traced.segments
        if segment.endswith(".attn")
        for work in traced.segments[segment].work.values()
        for operation, times in work.items()
    )
    assert counter.get_total_flops() <= traced.flops() <= counter.get_total_flops() + attention


def test_averaged_weights_and_gradients_of_the_step_before_are_counted(builders):
    plain = trace(builders.chain(zero_grad="after_step"), rules="cpu")
    copied = trace(builders.chain(zero_grad="after_step", copies=1), rules="cpu")
    weights = 3 * 4 * 128 * 128
    assert copied.peak_bytes - plain.peak_bytes == weights
    assert copied.static_bytes - plain.static_bytes == weights
    wide = {"width": 16, "rows": 4096}  # the activations decide
    early = trace(builders.chain(**wide, zero_grad="after_step"), rules="cpu")
    late = trace(builders.chain(**wide, accumulate=2), rules="cpu")
    assert late.peak_bytes > early.peak_bytes


def test_clipping_and_all_precisions_can_be_traced(builders):
    for precision in ("fp32", "bf16", "fp16"):
        traced = trace(builders.vit_unet(precision=precision, clip=1.0))
        assert traced.peak_bytes > traced.static_bytes
    half, single = (trace(builders.vit_unet((128, 128), precision=p)).peak_bytes for p in ("bf16", "fp32"))
    assert half < single


def test_frozen_stages_save_nothing(builders):
    frozen = trace(builders.vit_unet(frozen=2))
    assert frozen.segments["encoder.stage0"].saved_bytes == 0
    assert frozen.segments["encoder.stage0"].flops("backward") == 0
    assert frozen.segments["encoder.stage3"].flops("backward") > 0


def test_strips_lower_the_peak_of_many_classes(builders):
    whole, strips = (trace(builders.vit_unet((128, 128), classes=100, strips=n)) for n in (1, 8))
    assert strips.peak_bytes < whole.peak_bytes
    assert whole.peak_at.startswith("loss")
    assert len(strips.marks) < 60  # head and loss take turns in one stretch


def test_offloaded_boundaries_leave_the_device_on_cuda_alone(builders):
    step = builders.vit_unet((256, 256))
    tops = [f"encoder.stage{index}" for index in range(1, 4)]
    recompute, offload = (trace(step, Plan(dict.fromkeys(tops, p))) for p in ("recompute", "offload"))
    boundary = 257 * 64 * 4
    assert recompute.segments["encoder.stage0"].saved_bytes - boundary >= 0
    saved = sum(s.saved_bytes for s in recompute.segments.values())
    assert sum(s.saved_bytes for s in offload.segments.values()) < saved
    moved = offload.segments["encoder.stage1"].moved
    assert moved["forward"] >= boundary
    assert sum(s.moved["backward"] for s in offload.segments.values()) >= 3 * boundary


def test_rules_of_cuda_hold_inside_and_not_after():
    x = torch.ones(1, 2, 8, 8).bfloat16()
    functional = torch.nn.functional
    for _ in range(2):
        with cuda_rules(), torch.autocast("cpu", torch.bfloat16):
            assert functional.interpolate(x, scale_factor=2).dtype == torch.float32
            assert functional.layer_norm(x, (8,)).dtype == torch.float32
            assert x.sum().dtype == x.softmax(1).dtype == torch.float32
            assert x.sum(dtype=torch.float64).dtype == torch.float64
            assert functional.gelu(x).dtype == torch.bfloat16
        with cuda_rules():
            assert functional.interpolate(x, scale_factor=2).dtype == torch.bfloat16
        with torch.autocast("cpu", torch.bfloat16):
            assert functional.interpolate(x, scale_factor=2).dtype == torch.bfloat16
    assert functional.scaled_dot_product_attention(x, x, x).shape == x.shape


def test_unknown_precision():
    with pytest.raises(UserError, match="precision=int8"):
        Step(torch.nn.Identity(), lambda m, b: b, lambda m: m, {}, precision="int8")


def test_step_is_a_value(builders):
    step = builders.chain()
    assert dataclasses.replace(step, accumulate=4).accumulate == 4


class Convolution(torch.nn.Module):
    """One 3 x 3 convolution, of features that want a gradient."""

    def __init__(self, channels, results):
        super().__init__()
        self.first = torch.nn.Conv2d(3, channels, 1, bias=False)
        self.second = torch.nn.Conv2d(channels, results, 3, padding=1, bias=False)

    def segments(self):
        return {"first": self.first, "second": self.second}

    def forward(self, x):
        return self.second(self.first(x))


@pytest.mark.skipif(
    "AVX512" not in torch.backends.cpu.get_cpu_capability(), reason="the layouts were read on AVX-512"
)
@pytest.mark.parametrize(
    ("channels", "results", "precision"),
    [
        *(
            (*pair, "fp32")
            for pair in [(4, 4), (8, 8), (8, 16), (12, 12), (16, 8), (16, 16), (32, 19), (24, 24)]
        ),
        *((*pair, "bf16") for pair in [(8, 8), (8, 16), (12, 12), (16, 8), (16, 16), (32, 19), (24, 24)]),
    ],
)
def test_convolutions_of_any_width_against_the_ledger(channels, results, precision):
    def step():
        return Step(
            Convolution(channels, results),
            lambda model, batch: model(batch["x"]).square().mean(),
            lambda model: torch.optim.SGD(model.parameters()),
            {"x": ((1, 3, 192, 192), torch.float32)},
            precision=precision,
        )

    once, roots = run(step())
    measured = measure_cpu_peak(once, roots=roots)
    assert trace(step(), rules="cpu").peak_bytes == pytest.approx(measured, rel=0.01)


def test_an_offloaded_tensor_lies_in_the_same_memory_on_the_cpu(builders):
    size, more = (128, 128), {"precision": "fp32"}
    real = builders.vit_unet(size, device="cpu", **more)
    plan = Plan(dict.fromkeys(make_plan("stage", list(real.model.segments())), "offload"))
    once, roots = run(real, plan)
    measured = measure_cpu_peak(once, roots=roots)
    assert (
        -0.01 <= trace(builders.vit_unet(size, **more), plan, rules="cpu").peak_bytes / measured - 1 <= 0.03
    )
