"""The modes worth choosing between: less memory or more speed than every other."""

from collections.abc import Mapping


def dominates(first: tuple[float, float], second: tuple[float, float]) -> bool:
    """Whether `first` is nowhere worse than `second` and somewhere better, in (peak bytes, samples/s)."""
    return first[0] <= second[0] and first[1] >= second[1] and first != second


def pareto_front(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """Names of the points that no other dominates, fastest first.

    Args:
        points: name -> (peak bytes, less is better; samples per second, more is better). Equal points are on
            the front together, in the order given.
    """
    front = [
        name
        for name, point in points.items()
        if not any(dominates(other, point) for other in points.values())
    ]
    return sorted(front, key=lambda name: (-points[name][1], points[name][0]))
