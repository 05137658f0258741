import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from seg4k.activation_checkpointing import (
    ActivationCheckpointingError,
    Plan,
    apply_activation_checkpointing,
    make_plan,
)

ONE = torch.ones(1, dtype=torch.double, requires_grad=True)


def plainly(function, *args, **kwargs):
    return function(*args, **kwargs)


def gradients(case, call):
    torch.manual_seed(0)
    w = torch.randn(8, 8, dtype=torch.double, requires_grad=True)
    x = torch.linspace(-1, 1, 32, dtype=torch.double).reshape(4, 8).requires_grad_()
    case(x, w, call).backward()
    return x.grad, w.grad


# --- changes that no recomputation survives: each is an error that names the segment ---


def positional(x, w, call):
    h = x @ w
    return call(lambda h: torch.sin(h.add_(1.0)) @ w, h).sum()


def keyword(x, w, call):
    h = x @ w
    return call(lambda h: torch.sin(h.add_(1.0)) @ w, h=h).sum()


def in_list(x, w, call):
    h = x @ w
    return call(lambda t: torch.sin(t[0].add_(1.0)) @ w, [h]).sum()


def in_dict(x, w, call):
    h = x @ w
    return call(lambda t: torch.sin(t["h"].add_(1.0)) @ w, {"h": h}).sum()


def closure(x, w, call):
    h = x @ w
    return call(lambda d: torch.sin(h.add_(1.0)) @ w * d.sum(), ONE).sum()


def with_detached_alias(x, w, call):
    h = x @ w
    alias = h.detach()
    return call(lambda h: torch.sin(h.add_(1.0)) @ w, h).sum() + alias.sum()


def through_detach(x, w, call):
    h = x @ w

    def body(h):
        with torch.no_grad():
            h.detach().mul_(3.0)
        return torch.sin(h) @ w

    return call(body, h).sum()


def through_data(x, w, call):
    h = x @ w

    def body(h):
        h.data.mul_(3.0)
        return torch.sin(h) @ w

    return call(body, h).sum()


def through_view(x, w, call):
    h = x @ w

    def body(h):
        h[:, 0].mul_(3.0)
        return torch.sin(h) @ w

    return call(body, h).sum()


def functional_relu(x, w, call):
    h = x @ w
    return call(lambda h: F.relu_(h) @ w, h).sum()


def image_in_segment(x, w, call):
    image = torch.ones(4, 8, dtype=torch.double)

    def body(image, w):
        image.sub_(0.5)
        return torch.sin(image * 2 @ w)

    return call(body, image, w).sum() + x.sum()


def skip_after(x, w, call):
    h = x @ w
    o = call(lambda h: torch.sin(h * 1.0) @ w, h)
    h.add_(1.0)
    return (o + h).sum()


def skip_after_keyword(x, w, call):
    h = x @ w
    o = call(lambda h: torch.sin(h * 1.0) @ w, h=h)
    h.add_(1.0)
    return (o + h).sum()


def skip_after_closure(x, w, call):
    h = x @ w
    o = call(lambda q: torch.sin(h * q) @ w, ONE)
    h.add_(1.0)
    return (o + h).sum()


def skip_after_list(x, w, call):
    h = x @ w
    o = call(lambda t: torch.sin(t[0] * 1.0) @ w, [h])
    h.add_(1.0)
    return (o + h).sum()


def skip_after_data(x, w, call):
    h = x @ w
    o = call(lambda h: torch.sin(h * 1.0) @ w, h)
    h.data.add_(1.0)
    return (o + h).sum()


def skip_after_data_closure(x, w, call):
    h = x @ w
    o = call(lambda q: torch.sin(h * q) @ w, ONE)
    h.data.add_(1.0)
    return (o + h).sum()


def skip_after_detach(x, w, call):
    h = x @ w
    o = call(lambda h: torch.sin(h * 1.0) @ w, h)
    with torch.no_grad():
        h.detach().add_(1.0)
    return (o + h).sum()


def image_after(x, w, call):
    image = torch.ones(4, 8, dtype=torch.double)
    o = call(lambda i, w: torch.sin(i * 2 @ w), image, w)
    image.add_(1.0)
    return (o @ w).sum() + x.sum()


def weight_after(x, w, call):
    o = call(lambda h: torch.sin(h @ w), x @ w)
    with torch.no_grad():
        w.data.mul_(1.5)
    return o.sum()


def python_random(x, w, call):
    random.seed(1)
    return call(lambda h: h * random.random() @ w, x @ w).sum()


def numpy_random(x, w, call):
    rng = np.random.default_rng(1)
    return call(lambda h: h * torch.from_numpy(rng.random((4, 8))) @ w, x @ w).sum()


def numpy_scalar(x, w, call):
    rng = np.random.default_rng(1)
    return call(lambda h: (h + torch.tensor(rng.random())) @ w, x @ w).sum()


def counter(x, w, call):
    state = {"n": 1.0}

    def body(h):
        state["n"] += 1
        return torch.sin(h) * state["n"] @ w

    return call(body, x @ w).sum()


def explicit_generator(x, w, call):
    generator = torch.Generator().manual_seed(3)
    return call(lambda h: h * torch.rand(4, 8, generator=generator, dtype=torch.double) @ w, x @ w).sum()


def in_place_counter(x, w, call):
    state = {"n": 1.0}

    def body(h):
        state["n"] += 1
        return torch.sin(h * 1.0).add_(state["n"]) @ w

    return call(body, x @ w).sum()


def buffer_counter(x, w, call):
    calls = torch.zeros((), dtype=torch.double)

    def body(h):
        calls.add_(1)
        return torch.sin(h * calls) @ w

    return call(body, x @ w).sum()


BY_GUARD = [
    positional,
    keyword,
    in_list,
    in_dict,
    with_detached_alias,
    through_detach,
    through_view,
    functional_relu,
    image_in_segment,
    skip_after,
    skip_after_keyword,
    skip_after_list,
    skip_after_detach,
    image_after,
]
BY_AUDIT = [
    closure,
    through_data,
    skip_after_closure,
    skip_after_data,
    skip_after_data_closure,
    weight_after,
    python_random,
    numpy_random,
    numpy_scalar,
    counter,
    explicit_generator,
    in_place_counter,
    buffer_counter,
]


@pytest.mark.parametrize("case", [*BY_GUARD, *BY_AUDIT])
def test_inexact_is_an_error_that_names_the_segment(case, lone):
    with pytest.raises(ActivationCheckpointingError, match="segment part"):
        gradients(case, lone())


@pytest.mark.parametrize("case", BY_GUARD)
@pytest.mark.parametrize("policy", ["recompute", "offload"])
def test_the_cheap_guard_alone_sees_what_a_version_counter_tells(case, policy, lone):
    with pytest.raises(ActivationCheckpointingError, match=r"segment part.*in place"):
        gradients(case, lone(policy, audit="off"))


# --- what recomputation does exactly ---


def temporary_relu(x, w, call):
    return call(lambda h: F.relu_(h * 2) @ w, x @ w).sum()


def temporary_add(x, w, call):
    return call(lambda h: torch.sin((h * 2).add_(1)) @ w, x @ w).sum()


def temporary_view(x, w, call):
    def body(h):
        z = h * 2
        z[:, 1].add_(1)
        return torch.sin(z) @ w

    return call(body, x @ w).sum()


def output_not_saved(x, w, call):
    o = call(torch.sin, x @ w)
    o.mul_(2.0)
    return (o @ w).sum()


def dropout(x, w, call):
    torch.manual_seed(1)
    return call(lambda h: F.dropout(h, 0.5) @ w, x @ w).sum()


def rrelu(x, w, call):
    torch.manual_seed(1)
    return call(lambda h: F.rrelu(h, training=True) @ w, x @ w).sum()


def constant(x, w, call):
    return call(lambda h: (h + torch.tensor(0.5)) @ w.new_tensor([[2.0] * 8] * 8), x @ w).sum()


@pytest.mark.parametrize(
    "case",
    [temporary_relu, temporary_add, temporary_view, output_not_saved, dropout, rrelu, constant],
)
@pytest.mark.parametrize("policy", ["recompute", "offload"])
def test_exact_is_exact(case, policy, lone):
    expected = gradients(case, plainly)
    assert all(map(torch.equal, gradients(case, lone(policy, audit="always")), expected))


@pytest.mark.parametrize("activation", [torch.exp, torch.sigmoid, F.relu])
def test_a_changed_output_is_exact_where_eager_mode_would_raise(activation, lone):
    def case(x, w, call):
        o = call(lambda h: activation(h @ w), x @ w)
        o.add_(2.0)
        return (o @ w).sum()

    def out_of_place(x, w, call):
        return ((activation(x @ w @ w) + 2.0) @ w).sum()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(case, plainly)
    assert all(map(torch.equal, gradients(case, lone()), gradients(out_of_place, plainly)))


def test_a_result_kept_by_selective_may_not_change(lone):
    def case(x, w, call):
        def body(h):
            z = F.scaled_dot_product_attention(h[None, None], h[None, None], h[None, None])
            z.add_(1.0)
            return torch.sin(z) @ w

        return call(body, x @ w).sum()

    for audit in ("off", "first_step"):
        with pytest.raises(ActivationCheckpointingError, match="segment part"):
            gradients(case, lone("selective", audit=audit))


def test_an_input_of_an_inner_segment_may_not_change_inside_the_outer():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))

        def forward(self, x):
            h = x * 2
            y = self.inner(h)
            with torch.no_grad():
                h.detach().add_(1.0)
            return torch.sin(y)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.outer = Outer()

        def segments(self):
            return {"outer": self.outer, "outer.inner": self.outer.inner}

    model = Model().train()
    plan = Plan({"outer": "recompute", "outer.inner": "recompute"})
    apply_activation_checkpointing(model, plan, audit="off")
    loss = model.outer(torch.randn(2, 8, requires_grad=True)).sum()
    with pytest.raises(ActivationCheckpointingError, match=r"segment outer\.inner.*in place"):
        loss.backward()


def test_errors_name_module_operation_and_line(toy):
    model = toy()

    class Hasty(nn.Module):
        def forward(self, x):
            return x.data.mul_(2)

    model.stages[1][0].mlp[2] = Hasty()
    model.stages[1][0].mlp[0] = nn.Identity()
    model.stages[1][0].mlp[1] = nn.Identity()
    model.stages[1][0].mlp[3] = nn.Identity()
    apply_activation_checkpointing(model, make_plan("layer", list(model.segments())))
    mlp = r"encoder\.stage1\.block0\.mlp"
    message = rf"segment {mlp}: aten\.mul_.* in {mlp}\.2 \(test_inplace"
    with pytest.raises(ActivationCheckpointingError, match=message):
        model(torch.rand(2, 3, 16, 16))


def test_audit_first_step_ends_after_a_backward_and_always_does_not():
    state = {"n": 0.0, "on": False}

    class Counting(nn.Module):
        def forward(self, x):
            state["n"] += state["on"]
            return torch.sin(x * (1 + state["n"]))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = Counting()

        def segments(self):
            return {"part": self.part}

    for audit, raises in (("first_step", False), ("always", True)):
        model = Model().train()
        apply_activation_checkpointing(model, Plan({"part": "recompute"}), audit=audit)
        x = torch.randn(4, requires_grad=True)
        state["on"] = False
        model.part(x)  # a forward without its backward ends nothing
        model.part(x).sum().backward()
        state["on"] = True
        loss = model.part(x).sum()
        if raises:
            with pytest.raises(ActivationCheckpointingError):
                loss.backward()
        else:
            loss.backward()


def test_a_table_that_a_module_computes_once_and_keeps_is_no_error(lone):
    def case(x, w, call):
        kept = {}

        def body(h):
            if "table" not in kept:
                kept["table"] = torch.arange(8, dtype=h.dtype).sin().mul(2).softmax(0)
            return torch.sin(h * kept["table"]) @ w

        return call(body, x @ w).sum()

    assert all(map(torch.equal, gradients(case, lone()), gradients(case, plainly)))


def test_a_branch_taken_in_one_pass_only_is_an_error(lone):
    def case(x, w, call, extra):
        runs = []

        def body(h):
            runs.append(1)
            h = torch.sin(h)
            if len(runs) == extra:
                h = h * 1.5
            return torch.sin(h @ w)

        return call(body, x @ w).sum()

    for extra in (1, 2):
        with pytest.raises(ActivationCheckpointingError, match="segment part: in recomputation"):
            gradients(lambda *args, extra=extra: case(*args, extra), lone())


def test_eval_between_forward_and_backward_is_an_error(toy):
    model = toy()
    apply_activation_checkpointing(model, make_plan("stage", list(model.segments())))
    loss = model(torch.rand(2, 3, 16, 16)).sum()
    model.eval()
    with pytest.raises(ActivationCheckpointingError, match=r"train\(\) or eval\(\)"):
        loss.backward()


def test_inplace_modules_are_made_out_of_place_once_and_put_back(toy, caplog):
    model = toy()
    inplace = [name for name, module in model.named_modules() if getattr(module, "inplace", False)]
    with caplog.at_level("INFO"):
        applied = apply_activation_checkpointing(model, make_plan("decoder", list(model.segments())))
        apply_activation_checkpointing(model, make_plan("none", list(model.segments())))
        apply_activation_checkpointing(model, make_plan("decoder", list(model.segments())))
        apply_activation_checkpointing(model, make_plan("none", list(model.segments())))
    assert sorted(applied.made_out_of_place) == sorted(inplace)
    assert len([record for record in caplog.records if "out-of-place" in record.message]) == 1
    assert inplace == [name for name, module in model.named_modules() if getattr(module, "inplace", False)]
