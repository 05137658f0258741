import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seg4k.errors import UserError
from seg4k.memory.storages import static_bytes
from seg4k.training.eight_bit import Footprint, from_plain, to_plain
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


def test_quantised_moments_are_kept_as_plain_tensors():
    class OptimState8bit:
        codes, scale, qmap = torch.zeros(512, dtype=torch.uint8), torch.ones(2), torch.linspace(-1, 1, 256)
        signed, dtype = True, torch.float32

    state = [
        {"state": {0: {"step": torch.tensor(1.0), "exp_avg": OptimState8bit()}}, "param_groups": [{"lr": 1}]}
    ]
    plain = to_plain(state)
    assert plain[0]["param_groups"] == [{"lr": 1}]
    moment = plain[0]["state"][0]["exp_avg"]
    assert moment["codes"].shape == (512,)
    assert (moment["signed"], moment["dtype"]) == (True, "float32")


def test_adamw_8bit_goes_on_from_its_state(tmp_path):
    pytest.importorskip("torchao")

    def steps(optimizer, parameter, count, first=0):
        for step in range(first, first + count):
            parameter.grad = torch.sin(torch.arange(8192.0).view(64, 128) + step)
            optimizer.step()

    def make():
        parameter = torch.nn.Parameter(torch.zeros(64, 128))
        return parameter, build_optimizer({**ADAMW, "name": "adamw_8bit"}, [(0, "weight", parameter)])

    whole, optimizer = make()
    steps(optimizer, whole, 3)
    torch.save(
        {"state": to_plain([optimizer.state_dict()]), "weight": whole.detach().clone()}, tmp_path / "x"
    )
    steps(optimizer, whole, 3, first=3)
    content = torch.load(tmp_path / "x", weights_only=True)
    resumed, again = make()
    resumed.data.copy_(content["weight"])
    again.load_state_dict(from_plain(content["state"])[0])
    steps(again, resumed, 3, first=3)
    assert torch.equal(whole, resumed)
    exact = torch.nn.Parameter(torch.zeros(64, 128))
    plain = build_optimizer(ADAMW, [(0, "weight", exact)])
    steps(plain, exact, 6)
    assert float((exact - whole).detach().abs().max()) < 0.1 * float(exact.detach().abs().max())


def test_without_torchao_the_extra_is_named(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(UserError, match=r"seg4k\[8bit\]"):
        build_optimizer({**ADAMW, "name": "adamw_8bit"}, [(0, "weight", torch.nn.Parameter(torch.zeros(4)))])


def test_a_trace_counts_what_adamw_8bit_holds():
    pytest.importorskip("torchao")
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in ((64, 128), (63, 65), (10,))]
    footprint = Footprint([{"params": parameters}])
    optimizer = build_optimizer(
        {**ADAMW, "name": "adamw_8bit"}, [(0, str(i), p) for i, p in enumerate(parameters)]
    )
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    footprint.step()
    optimizer.step()
    maps = 2 * 256 * 4  # the table of the codes' values, of each moment
    steps = 3 * 4
    held = static_bytes([], [optimizer])
    assert held == static_bytes([], [footprint]) + maps + steps
    assert held < 2.3 * 64 * 128 + 9 * 4096  # two bytes for each value of the large one, eight for the others
