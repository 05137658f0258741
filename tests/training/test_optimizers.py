import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seg4k.errors import UserError
from seg4k.training.optimizers import build_optimizer, parameter_groups, schedule

ADAMW = {"name": "adamw", "lr": 1e-3, "weight_decay": 0.05, "betas": [0.9, 0.95], "layer_decay": 0.5}


def parameters():
    matrix, vector = torch.nn.Parameter(torch.zeros(2, 2)), torch.nn.Parameter(torch.zeros(2))
    frozen = torch.nn.Parameter(torch.zeros(2, 2), requires_grad=False)
    return [
        (0, "encoder.pos_embed", torch.nn.Parameter(torch.zeros(1, 4, 2))),
        (1, "block1.weight", matrix),
        (1, "block1.bias", vector),
        (1, "block1.frozen", frozen),
        (2, "block2.weight", torch.nn.Parameter(torch.zeros(2, 2))),
        (3, "head.weight", torch.nn.Parameter(torch.zeros(2, 2, 1, 1))),
        (3, "head.norm.weight", torch.nn.Parameter(torch.zeros(2))),
    ]


def test_groups_by_depth_and_decay():
    groups = parameter_groups(parameters(), lr=1.0, weight_decay=0.1, layer_decay=0.5)
    assert [(g["name"], g["lr"], g["weight_decay"], len(g["params"])) for g in groups] == [
        ("depth0_undecayed", 0.25, 0.0, 1),
        ("depth1_undecayed", 0.5, 0.0, 1),
        ("depth1", 0.5, 0.1, 1),
        ("depth2", 1.0, 0.1, 1),  # the encoder's last block learns at the full rate, as the head does
        ("depth3_undecayed", 1.0, 0.0, 1),
        ("depth3", 1.0, 0.1, 1),
    ]


def test_optimizers():
    adamw = build_optimizer(ADAMW, parameters())
    assert isinstance(adamw, torch.optim.AdamW)
    assert adamw.param_groups[0]["betas"] == (0.9, 0.95)
    sgd = {"name": "sgd", "lr": 0.1, "weight_decay": 0.0, "momentum": 0.9, "layer_decay": 1.0}
    assert isinstance(build_optimizer(sgd, parameters()), torch.optim.SGD)


@pytest.mark.parametrize(("change", "message"), [({"name": "adam"}, "name"), ({"lr": 0}, "optimizer.lr")])
def test_bad_optimizers(change, message):
    with pytest.raises(UserError, match=message):
        build_optimizer({**ADAMW, **change}, parameters())


def test_nothing_to_train():
    frozen = [(0, "a", torch.nn.Parameter(torch.zeros(1), requires_grad=False))]
    with pytest.raises(UserError, match="frozen"):
        build_optimizer(ADAMW, frozen)


@given(
    st.sampled_from(["cosine", "polynomial"]),
    st.integers(0, 50),
    st.integers(1, 200),
    st.floats(0, 1),
)
def test_schedule_rises_then_falls_to_the_final_ratio(name, warmup, steps, final):
    factor = schedule({"name": name, "warmup_steps": warmup, "final_ratio": final, "power": 0.9}, steps)
    values = [factor(step) for step in range(steps + 1)]
    top = min(warmup, steps)
    assert all(a <= b for a, b in itertools.pairwise(values[:top]))
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(values[top:]))
    assert max(values) <= 1 + 1e-12
    if steps > warmup:
        assert math.isclose(values[-1], final, abs_tol=1e-12)


def test_schedules_in_closed_form():
    cosine = schedule({"name": "cosine", "warmup_steps": 10, "final_ratio": 0.0}, 110)
    assert [cosine(0), cosine(9), cosine(10), cosine(60)] == pytest.approx([0.1, 1.0, 1.0, 0.5])
    polynomial = schedule({"name": "polynomial", "warmup_steps": 0, "final_ratio": 0.1, "power": 2.0}, 100)
    assert polynomial(50) == pytest.approx(0.1 + 0.9 * 0.25)


@pytest.mark.parametrize("change", [{"name": "step"}, {"warmup_steps": -1}])
def test_bad_schedules(change):
    with pytest.raises(UserError):
        schedule({"name": "cosine", "warmup_steps": 0, "final_ratio": 0, **change}, 10)
