import pytest

from seg4k.training.summary import waiting_hint


@pytest.mark.parametrize("fraction", [None, 0.0, 0.05])
def test_no_hint_where_training_hardly_waits(fraction):
    assert waiting_hint(fraction, {"cache": "none"}) is None


def test_a_hint_where_it_waits():
    hint = waiting_hint(0.123, {"cache": "none"})
    assert hint.startswith("12% of the time went into waiting for data; try more data.num_workers")
    assert "data.cache=ram or disk" in hint
    assert "data.cache" not in waiting_hint(0.06, {"cache": "ram"})
    assert "data.cache" not in waiting_hint(0.06, {})  # data=blue_marble has none: it is in memory
