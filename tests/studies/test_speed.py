import pytest
import torch

from seg4k.errors import UserError
from seg4k.studies.speed import interleaved_timing


class Machine:
    """A clock that arms turn on, and that slows down from call to call."""

    def __init__(self, drift=0.0):
        self.now = 0.0
        self.calls = []
        self.drift = drift

    def arm(self, name, seconds):
        def step():
            self.now += seconds * (1 + self.drift * (len(self.calls) // 2))
            self.calls.append(name)

        return step


def test_ratios_hold_where_the_machine_drifts():
    machine = Machine(drift=0.5)
    arms = {"none": machine.arm("none", 1.0), "stage": machine.arm("stage", 1.25)}
    result = interleaved_timing(arms, warmup=1, repeats=6, clock=lambda: machine.now)
    stage = result["arms"]["stage"]
    assert result["baseline"] == "none"
    assert stage["ratios"] == pytest.approx([1.25] * 6)
    assert stage["ratio"] == pytest.approx(1.25)
    assert result["arms"]["none"]["ratios"] == [1.0] * 6
    assert stage["median_seconds"] == pytest.approx(sum(sorted(stage["seconds"])[2:4]) / 2)
    assert stage["iqr_seconds"][0] < stage["median_seconds"] < stage["iqr_seconds"][1]


def test_order_rotates_and_warmup_does_not_count():
    machine = Machine()
    arms = {name: machine.arm(name, 1.0) for name in "abc"}
    result = interleaved_timing(arms, warmup=2, repeats=4, clock=lambda: machine.now)
    assert "".join(machine.calls) == "abcbcacababcbcacab"
    assert all(len(arm["seconds"]) == 4 for arm in result["arms"].values())


def test_another_baseline_and_one_repeat():
    machine = Machine()
    arms = {"none": machine.arm("none", 1.0), "stage": machine.arm("stage", 2.0)}
    result = interleaved_timing(arms, warmup=0, repeats=1, baseline="stage", clock=lambda: machine.now)
    assert result["arms"]["none"]["ratio"] == 0.5
    assert result["arms"]["none"]["ratio_iqr"] == [0.5, 0.5]


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no"), RuntimeError("DefaultCPUAllocator: can't allocate memory: 1")]
)
def test_an_arm_that_does_not_fit_is_dropped(error):
    machine = Machine()

    def too_big():
        raise error

    arms = {"none": too_big, "stage": machine.arm("stage", 2.0)}
    result = interleaved_timing(arms, warmup=1, repeats=3, clock=lambda: machine.now)
    assert result["arms"]["none"]["status"] == "out_of_memory"
    assert result["arms"]["none"]["median_seconds"] is None
    assert result["arms"]["stage"]["median_seconds"] == 2.0
    assert result["arms"]["stage"]["ratio"] is None


def test_other_errors_are_raised():
    def broken():
        raise RuntimeError("a fault")

    with pytest.raises(RuntimeError, match="a fault"):
        interleaved_timing({"a": broken}, warmup=0, repeats=1)


def test_real_clock_and_all_out_of_memory():
    x = torch.ones(64, 64)

    def too_big():
        raise torch.OutOfMemoryError("no")

    result = interleaved_timing({"a": lambda: x @ x, "b": lambda: x @ x @ x}, warmup=1, repeats=3)
    assert all(seconds > 0 for arm in result["arms"].values() for seconds in arm["seconds"])
    lost = interleaved_timing({"a": too_big}, warmup=2, repeats=2)["arms"]["a"]
    assert (lost["status"], lost["seconds"]) == ("out_of_memory", [])


@pytest.mark.parametrize(
    ("arms", "settings"),
    [
        ({}, {"warmup": 0, "repeats": 1}),
        ({"a": print}, {"warmup": -1, "repeats": 1}),
        ({"a": print}, {"warmup": 0, "repeats": 0}),
        ({"a": print}, {"warmup": 0, "repeats": 1, "baseline": "b"}),
    ],
)
def test_senseless_arguments(arms, settings):
    with pytest.raises(UserError):
        interleaved_timing(arms, **settings)
