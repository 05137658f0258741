import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from seg4k.activation_checkpointing import (
    ActivationCheckpointingError,
    Plan,
    apply_activation_checkpointing,
    make_plan,
    selective,
)
from seg4k.activation_checkpointing.measure import measure_segments
from seg4k.activation_checkpointing.selective import FUSED, AttentionMarker
from seg4k.errors import UserError

aten = torch.ops.aten


class Counter(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ran = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ran.append(func)
        return func(*args, **(kwargs or {}))


class Model(nn.Module):
    """Two attentions in one segment, by way of `attend`."""

    def __init__(self, attend):
        super().__init__()
        torch.manual_seed(0)
        self.part = Part(attend)
        self.train()

    def segments(self):
        return {"part": self.part}


class Part(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.attend = attend
        self.qkv = nn.ModuleList(nn.Linear(8, 24) for _ in range(2))

    def forward(self, x):
        for qkv in self.qkv:
            x = x + self.attend(*qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)).transpose(
                1, 2
            ).flatten(2)
        return x * x


def gradients(model):
    torch.manual_seed(2)
    x = torch.randn(2, 5, 8, requires_grad=True)
    counter = Counter()
    loss = model.part(x).sum()
    with counter:
        loss.backward()
    return [x.grad, *(p.grad for p in model.parameters())], counter.ran


def fused(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def math(q, k, v):
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v)


def dropped(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.4)


def masked(q, k, v):
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@pytest.mark.parametrize("attend", [fused, math, dropped, masked])
@pytest.mark.parametrize("audit", ["off", "always"])
def test_attention_is_kept_exactly_on_every_backend(attend, audit):
    model = Model(attend)
    expected, _ = gradients(copy.deepcopy(model))
    recompute = copy.deepcopy(model)
    apply_activation_checkpointing(recompute, Plan({"part": "recompute"}), audit="off")
    again, recomputing = gradients(recompute)
    apply_activation_checkpointing(model, Plan({"part": "selective"}), audit=audit)
    found, ran = gradients(model)
    assert all(map(torch.equal, found, expected))
    assert all(map(torch.equal, again, expected))
    flash = aten._scaled_dot_product_flash_attention_for_cpu.default
    if attend in (fused, masked):
        assert (recomputing.count(flash), ran.count(flash)) == (2, 0)
    else:  # one product fewer per attention; probabilities are still made again, for backward
        assert recomputing.count(aten.bmm.default) - ran.count(aten.bmm.default) == 2


@pytest.mark.parametrize("name", [operator.name() for operator in FUSED])
def test_every_fused_operator_counts_as_attention(name):
    assert AttentionMarker().gives_result(next(o for o in FUSED if o.name() == name))


def test_the_operators_of_all_backends_are_known():
    names = " ".join(operator.name() for operator in FUSED)
    for backend in ("flash_attention ", "efficient", "cudnn", "for_cpu", "overrideable"):
        assert backend in f"{names} "


def test_random_numbers_that_a_kept_operator_drew_are_not_drawn_again_by_others(monkeypatch):
    """Fused attention draws its dropout itself, on CUDA; here another operator stands for it."""
    monkeypatch.setattr(selective, "FUSED", (aten.bernoulli.p,))

    def drawing(q, k, v):
        return F.dropout(torch.bernoulli(q.detach(), 0.5) * k + v, 0.5)

    results = []
    for plan in (Plan(), Plan({"part": "selective"})):
        model = Model(drawing)
        apply_activation_checkpointing(model, plan, audit="always")
        results.append([*gradients(model)[0], torch.get_rng_state()])
    assert all(map(torch.equal, *results))


def test_a_product_outside_attention_is_not_kept():
    marker = AttentionMarker()
    for operator in (aten._softmax.default, aten.bmm.default):
        assert not marker.gives_result(operator)

    def by_hand(q, k, v):
        return (q @ k.transpose(-2, -1)).softmax(-1) @ v

    model = Model(by_hand)
    apply_activation_checkpointing(model, Plan({"part": "selective"}))
    with pytest.raises(UserError, match=r"segment part is selective.*TIMM_FUSED_ATTN=1.*recompute"):
        gradients(model)


def test_multi_head_attention_of_torch_is_kept():
    class Attend(nn.Module):
        def __init__(self, weights):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.weights = weights

        def forward(self, x):
            return self.attention(x, x, x, need_weights=self.weights)[0] ** 2

    for weights in (False, True):
        torch.manual_seed(0)
        model = Model(None)
        model.part = Attend(weights)
        plain = copy.deepcopy(model)
        apply_activation_checkpointing(model, Plan({"part": "selective"}), audit="always")
        assert all(map(torch.equal, gradients(model)[0], gradients(plain)[0]))


def test_the_mode_selective_asks_attention_of_the_encoder_only(toy):
    model = toy()
    apply_activation_checkpointing(model, make_plan("selective", list(model.segments())))
    model(torch.rand(1, 3, 16, 16)).sum().backward()


def test_backward_twice_is_refused(toy):
    model = toy()
    apply_activation_checkpointing(model, make_plan("selective", list(model.segments())))
    loss = model(torch.rand(1, 3, 16, 16)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(ActivationCheckpointingError, match=r"segment encoder\.stage1.*second time"):
        loss.backward()


def test_what_selective_keeps_is_attention_and_no_more(toy):
    model, image = toy(), torch.rand(1, 3, 16, 16)
    names = list(model.segments())
    measured = {
        mode: measure_segments(
            model, image, loss_fn=lambda x: x.square().sum(), plan=make_plan(mode, names)
        ).segments["encoder.stage1"]
        for mode in ("stage", "selective")
    }
    result = 16 * model.dim * 4
    logsumexp = 16 * 2 * 4
    assert measured["selective"].saved_bytes - measured["stage"].saved_bytes == 2 * (result + logsumexp)


def test_inside_a_recomputed_segment_nothing_is_held_until_the_outer_is_recomputed(toy):
    model, image = toy(), torch.rand(1, 3, 16, 16)

    def saved(inner):
        plan = Plan({"encoder.stage1": "recompute", "encoder.stage1.block0": inner})
        return measure_segments(model, image, loss_fn=lambda x: x.square().sum(), plan=plan).saved_bytes

    assert saved("selective") == saved("recompute") == saved("keep")
