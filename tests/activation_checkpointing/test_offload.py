import gc

import pytest
import torch

from seg4k.activation_checkpointing import (
    ActivationCheckpointingError,
    Plan,
    apply_activation_checkpointing,
    offload,
)
from seg4k.activation_checkpointing.measure import measure_segments


@pytest.fixture(autouse=True)
def move_everything(monkeypatch):
    monkeypatch.setattr(offload, "SMALLEST_BYTES", 1)


@pytest.fixture
def copies(monkeypatch):
    made = []

    class Recorded(offload.HostCopy):
        def __init__(self, tensor):
            super().__init__(tensor)
            made.append(tensor.shape)

    monkeypatch.setattr(offload, "HostCopy", Recorded)
    return made


def test_it_is_exact(toy, same_as_none):
    for options in ({}, {"precision": "bf16", "accumulate": 2}):
        model = toy(dropout=0.2)
        plan = Plan(dict.fromkeys((n for n in model.segments() if n.count(".") == 1), "offload"))
        same_as_none(model, plan, steps=2, **options)


def test_a_skip_that_bounds_two_segments_is_copied_once(lone, copies):
    call = lone("offload")
    x = torch.randn(4, 8, requires_grad=True)
    skip = x * 2
    first = call(lambda s: torch.sin(s) * s, skip)
    second = call(lambda s, f: torch.cos(s) * f, skip, first)
    assert copies == [skip.shape, first.shape]
    second.sum().backward()
    skip = x * 2
    first = torch.sin(skip) * skip
    expected = torch.autograd.grad((torch.cos(skip) * first).sum(), x)[0]
    assert torch.equal(x.grad, expected)


def test_a_changed_tensor_is_copied_again(lone, copies):
    call = lone("offload", audit="off")
    x = torch.randn(4, 8, requires_grad=True)
    h = x * 2
    first = call(torch.sin, h)
    h.add_(1)
    second = call(torch.cos, h)
    assert len(copies) == 2
    second.sum().backward(retain_graph=True)
    with pytest.raises(ActivationCheckpointingError, match="segment part: its input 1 of 1"):
        first.sum().backward()


def test_host_copies_go_with_the_graph(lone):
    call = lone("offload")
    x = torch.randn(4, 8, requires_grad=True)
    h = x * 2
    call(torch.sin, h).sum().backward()
    gc.collect()
    assert all(reference() is None for _, reference in offload._copies.values())


def test_small_tensors_parameters_and_tensors_with_gaps_stay(monkeypatch, lone, copies):
    monkeypatch.setattr(offload, "SMALLEST_BYTES", 64)
    call = lone("offload")
    wide = torch.randn(8, 16, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(16))
    small = torch.randn(1, requires_grad=True)
    gaps = (wide * 1)[:, ::2]
    turned = (wide * 1).t()
    out = call(
        lambda g, t, w, s: (g.sin().sum() + t.sin().sum()) * s + w.sin().sum(), gaps, turned, weight, small
    )
    assert copies == [turned.shape]
    out.backward()
    expected = torch.cos(wide) + torch.cos(wide) * (torch.arange(16) % 2 == 0)
    torch.testing.assert_close(wide.grad, expected * small.detach())


def test_strides_survive_the_journey(lone):
    call = lone("offload")
    x = torch.randn(2, 3, 4, 5, requires_grad=True)
    seen = []

    def body(h):
        seen.append(h.stride())
        return torch.sin(h)

    call(body, (x * 1).contiguous(memory_format=torch.channels_last)).sum().backward()
    assert seen[0] == seen[1] == (60, 1, 15, 3)


def test_device_memory_is_traded_for_host_memory(toy):
    model, image = toy(), torch.rand(1, 3, 16, 16)
    names = ["encoder.stage0", "encoder.stage1"]

    def measured(policy):
        plan = Plan(dict.fromkeys(names, policy))
        return measure_segments(model, image, loss_fn=lambda x: x.square().sum(), plan=plan)

    recompute, offloaded = measured("recompute"), measured("offload")
    assert offloaded.saved_bytes < recompute.saved_bytes
    assert offloaded.host_bytes == recompute.saved_bytes - offloaded.saved_bytes == 2 * 16 * model.dim * 4
    assert offloaded.recompute_flops == recompute.recompute_flops


def test_inside_a_recomputed_segment_there_is_nothing_to_move(toy, copies):
    model = toy()
    apply_activation_checkpointing(
        model, Plan({"encoder.stage0": "recompute", "encoder.stage0.block1": "offload"})
    )
    model(torch.rand(1, 3, 16, 16)).sum().backward()
    assert copies == []
