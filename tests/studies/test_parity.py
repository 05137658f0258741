import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from seg4k.errors import UserError
from seg4k.studies.parity import confidence_interval, judge_parity, seeds_needed, student_t_quantile

DIFFERENCES = st.lists(st.floats(-3e-4, 3e-4), min_size=2, max_size=12)


def metrics(miou, loss=0.3, lake=0.1):
    return {"val_miou": miou, "val_iou": {"ocean": 0.9, "lake": lake}, "val_loss": loss, "val_samples": 4}


def pairs_with(differences):
    """Baseline and candidate whose val_miou differ so, up to rounding."""
    baseline = {seed: metrics(0.5) for seed in range(len(differences))}
    candidate = {seed: metrics(0.5 + difference) for seed, difference in enumerate(differences)}
    return baseline, candidate


@pytest.mark.parametrize("probability", [0.5, 0.6, 0.9, 0.95, 0.975, 0.999])
def test_student_quantile_against_scipy(probability):
    for degrees in [*range(1, 40), 99, 100, 199, 200, 201, 300, 1000, 10**6]:
        expected = stats.t.ppf(probability, degrees)
        assert student_t_quantile(probability, degrees) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@given(DIFFERENCES)
def test_interval_against_scipy(differences):
    spread = statistics.stdev(differences)
    low, high = confidence_interval(differences)
    if spread == 0:
        assert low == high == statistics.fmean(differences)
        return
    expected = stats.t.interval(
        0.95,
        len(differences) - 1,
        loc=statistics.fmean(differences),
        scale=spread / math.sqrt(len(differences)),
    )
    assert (low, high) == pytest.approx(expected, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("seeds", [1, 2, 5])
@pytest.mark.parametrize("noise_free", [True, False])
def test_equal_bits_are_exact(seeds, noise_free):
    runs = {seed: metrics(0.1 * seed + 1 / 3) for seed in range(seeds)}
    parity = judge_parity(runs, {seed: dict(one) for seed, one in runs.items()}, noise_free=noise_free)
    assert (parity.verdict, parity.pairs, parity.mean, parity.largest) == ("exact", seeds, 0.0, 0.0)


@pytest.mark.parametrize(
    "change",
    [{"val_miou": math.nextafter(0.5, 1)}, {"val_loss": math.nextafter(0.3, 1)}, {"val_iou": {"ocean": 0.9}}],
)
def test_one_bit_is_not_exact(change):
    baseline = {seed: metrics(0.5) for seed in range(3)}
    candidate = {**baseline, 1: {**metrics(0.5), **change}}
    assert judge_parity(baseline, candidate).verdict == "within_margin"


def test_absent_class_equals_absent_class_only():
    absent = {0: metrics(0.5, lake=None), 1: metrics(0.5, lake=None)}
    assert judge_parity(absent, {0: metrics(0.5, lake=float("nan")), 1: absent[1]}).verdict == "exact"
    assert judge_parity(absent, {0: metrics(0.5, lake=0.2), 1: absent[1]}).verdict == "within_margin"


def test_interval_inside_the_margin():
    parity = judge_parity(*pairs_with([1e-5, -2e-5, 2e-5, 0.0]))
    assert parity.verdict == "within_margin"
    assert parity.seeds_needed is None


def test_interval_beyond_the_margin_on_either_side():
    for sign in (1, -1):
        parity = judge_parity(*pairs_with([sign * value for value in (1.0e-2, 1.1e-2, 0.9e-2)]))
        assert parity.verdict == "outside_margin"
        assert parity.mean == pytest.approx(sign * 1e-2)


def test_not_significant_is_not_parity():
    parity = judge_parity(*pairs_with([1e-3, -1e-3, 1.1e-3]))
    low, high = parity.interval
    assert low < 0 < high
    assert parity.verdict == "inconclusive"
    assert f"{parity.seeds_needed:,}" in parity.words


def test_one_seed_is_inconclusive_unless_exact():
    parity = judge_parity(*pairs_with([1e-6]))
    assert (parity.verdict, parity.interval, parity.seeds_needed) == ("inconclusive", None, 2)


def test_no_spread_with_a_shift():
    # Exact in binary, so that the spread is zero and the interval a point.
    baseline, candidate = pairs_with([2.0**-12] * 3)
    assert judge_parity(baseline, candidate).verdict == "outside_margin"
    assert judge_parity(baseline, candidate, margin=2.0**-12).verdict == "within_margin"


@pytest.mark.parametrize(
    "candidate",
    [
        {seed: metrics(0.5 + shift) for seed, shift in enumerate((2e-3, -2e-3, 1e-3))},
        {seed: metrics(0.5, loss=0.3 + shift) for seed, shift in enumerate((2e-3, -2e-3, 1e-3))},
        {seed: metrics(0.5, lake=0.1 + shift) for seed, shift in enumerate((2e-3, -2e-3, 1e-3))},
        {0: metrics(0.5, lake=None)},
    ],
    ids=["miou", "loss", "class", "class gone"],
)
def test_drift_without_noise_is_outside(candidate):
    # The scatter of these would hide in noise, and there is none: every difference is the mode's.
    baseline = {seed: metrics(0.5) for seed in range(3)}
    assert judge_parity(baseline, candidate, noise_free=True).verdict == "outside_margin"
    assert judge_parity(baseline, candidate, noise_free=False).verdict in ("inconclusive", "within_margin")


def test_difference_below_the_margin_without_noise_is_told():
    parity = judge_parity(*pairs_with([1e-6, -1e-6, 1e-6]), noise_free=True)
    assert parity.verdict == "within_margin"
    assert "something differs" in parity.words


def test_only_pairs_count():
    baseline, candidate = pairs_with([0.0, 0.0, 0.5])
    del candidate[2]
    candidate[7] = metrics(0.9)
    parity = judge_parity(baseline, candidate)
    assert (parity.verdict, parity.pairs) == ("exact", 2)


@pytest.mark.parametrize("value", [None, float("nan")])
def test_pair_without_miou_is_left_out(value):
    baseline, candidate = pairs_with([0.0, 0.0])
    candidate[0] = {**candidate[0], "val_miou": value}
    assert judge_parity(baseline, candidate).pairs == 1
    candidate[1] = {}
    parity = judge_parity(baseline, candidate)
    assert (parity.verdict, parity.pairs, parity.mean) == ("inconclusive", 0, None)


def test_nothing_to_compare():
    assert judge_parity({}, {}).verdict == "inconclusive"
    assert "completed" in judge_parity({0: metrics(0.5)}, {1: metrics(0.5)}).words


@pytest.mark.parametrize("margin", [-1e-4, float("nan"), float("inf")])
def test_senseless_margin(margin):
    with pytest.raises(UserError, match="margin"):
        judge_parity({}, {}, margin=margin)


@given(DIFFERENCES, st.floats(1e-6, 1e-3))
def test_verdict_follows_its_definition(differences, margin):
    baseline, candidate = pairs_with(differences)
    seen = [candidate[seed]["val_miou"] - 0.5 for seed in baseline]
    parity = judge_parity(baseline, candidate, margin=margin)
    if not any(seen):
        assert parity.verdict == "exact"
        return
    low, high = confidence_interval(seen)
    expected = "within_margin" if max(-low, high) <= margin else "inconclusive"
    if low > margin or high < -margin:
        expected = "outside_margin"
    assert parity.verdict == expected
    assert parity.largest == max(map(abs, seen))
    assert (parity.seeds_needed is not None) == (
        expected == "inconclusive" and "more than" not in parity.words
    )


@given(st.lists(st.floats(-1e-3, 1e-3), min_size=2, max_size=8), st.randoms())
def test_order_of_seeds_does_not_matter(differences, shuffler: random.Random):
    baseline, candidate = pairs_with(differences)
    order = list(baseline)
    shuffler.shuffle(order)
    assert judge_parity({seed: baseline[seed] for seed in order}, candidate) == judge_parity(
        baseline, candidate
    )


@given(st.floats(-5e-4, 5e-4), st.floats(1e-6, 1e-2))
def test_seeds_needed_is_the_least_that_decides(mean, deviation):
    margin = 1e-4
    needed = seeds_needed(mean, deviation, margin)

    def half_width(count):
        return stats.t.ppf(0.975, count - 1) * deviation / math.sqrt(count)

    gap = abs(abs(mean) - margin)
    if needed is None:
        assert half_width(1_000_000) > gap * (1 - 1e-9)
        return
    assert half_width(needed) <= gap * (1 + 1e-9)
    assert needed == 2 or half_width(needed - 1) > gap * (1 - 1e-9)
