from hypothesis import given
from hypothesis import strategies as st

from seg4k.studies.pareto import dominates, pareto_front

POINTS = st.dictionaries(
    st.text(min_size=1, max_size=3), st.tuples(st.integers(1, 20), st.integers(1, 20)), max_size=15
)


def test_front_of_the_design():
    points = {
        "none": (19.9, 1.0),
        "stage": (7.0, 0.78),
        "block": (7.7, 0.77),
        "selective": (7.6, 0.95),
    }
    assert pareto_front(points) == ["none", "selective", "stage"]


def test_equal_points_stand_together():
    assert pareto_front({"a": (1, 1), "b": (1, 1), "c": (2, 1)}) == ["a", "b"]
    assert pareto_front({}) == []


@given(POINTS)
def test_front_is_what_nothing_dominates(points):
    front = pareto_front(points)
    assert bool(front) == bool(points)
    for name, point in points.items():
        beaten = [other for other in front if dominates(points[other], point)]
        assert (name in front) == (not beaten)


@given(POINTS)
def test_front_falls_in_speed_and_memory(points):
    front = [points[name] for name in pareto_front(points)]
    assert front == sorted(front, key=lambda point: (-point[1], point[0]))
    peaks = [peak for peak, _ in front]
    assert peaks == sorted(peaks, reverse=True)


@given(st.tuples(st.integers(1, 5), st.integers(1, 5)), st.tuples(st.integers(1, 5), st.integers(1, 5)))
def test_domination_is_one_way(first, second):
    assert not (dominates(first, second) and dominates(second, first))
    assert not dominates(first, first)
