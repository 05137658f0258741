import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from seg4k.data.labels import Labelling, distinct, histogram
from seg4k.errors import UserError

HERE = Path("m.png")


def labelling(classes, **more):
    return Labelling.from_dict({"classes": classes, **more}, "c.json")


@given(
    values=arrays(np.uint8, (5, 7)),
    owners=st.dictionaries(st.integers(0, 255), st.integers(0, 2), max_size=40),
    ignored=st.sets(st.integers(0, 255), max_size=20),
)
def test_values_become_labels_as_the_file_says(values, owners, ignored):
    owners = {value: label for value, label in owners.items() if value not in ignored | {255}}
    classes = [{"name": str(x), "ids": [v for v, label in owners.items() if label == x]} for x in range(3)]
    made = labelling(classes, ignored=sorted(ignored))
    known = {**owners, 255: 255, **dict.fromkeys(ignored, 255)}
    for raw in (values, values.astype(np.uint16)):
        wrong = sorted(set(np.unique(values).tolist()) - set(known))
        if wrong:
            with pytest.raises(UserError, match=rf"m.png holds the label {wrong[0]}\b.* in c.json"):
                made.apply(raw, HERE)
        else:
            expected = [[known[int(value)] for value in row] for row in raw]
            np.testing.assert_array_equal(made.apply(raw, HERE), expected)
    others = labelling(classes, ignored="others")
    expected = [[owners.get(int(value), 255) for value in row] for row in values]
    np.testing.assert_array_equal(others.apply(values, HERE), expected)


def test_colours_become_labels():
    made = labelling(
        [{"name": "a", "colour": [255, 0, 1]}, {"name": "b", "mask_colours": [[0, 0, 2], [0, 3, 0]]}],
        masks="colours",
        ignored=[[9, 9, 9]],
    )
    raw = np.array([[0xFF0001, 2], [0x000300, 0x090909]], np.uint32)
    np.testing.assert_array_equal(made.apply(raw, HERE), [[0, 1], [1, 255]])
    with pytest.raises(UserError, match=r"holds the colour \(0, 0, 3\), which no class has"):
        made.apply(np.full((2, 2), 3, np.uint32), HERE)
    again = pickle.loads(pickle.dumps(made))
    assert len(pickle.dumps(made)) < 2000  # without its table of all colours
    np.testing.assert_array_equal(again.apply(raw, HERE), made.apply(raw, HERE))


def test_many_classes_and_every_label_in_use():
    names = [str(number) for number in range(255)]
    made = labelling([{"name": name, "ids": number} for number, name in enumerate(names)])
    raw = np.arange(256, dtype=np.uint8).reshape(16, 16)
    np.testing.assert_array_equal(made.apply(raw, HERE), raw)
    wide = labelling([{"name": "a", "ids": 60000}, "b"], ignore_index=65535)
    np.testing.assert_array_equal(wide.apply(np.array([[60000, 1, 65535]], np.uint16), HERE), [[0, 1, 65535]])


def test_digests_tell_readings_apart():
    plain = labelling(["a", "b"])
    assert plain.ids is None
    assert plain.digest == labelling([{"name": "x"}, {"name": "y"}]).digest
    others = [
        labelling(["a", "b"], ignored=[7]),
        labelling(["a", "b"], ignored="others"),
        labelling(["a", {"name": "b", "ids": 3}]),
        labelling(["a", "b", "c"]),
        labelling(["a", "b"], ignore_index=254),
    ]
    assert len({made.digest for made in (plain, *others)}) == 6


@pytest.mark.parametrize(
    ("classes", "more", "message"),
    [
        (
            [{"name": "a", "ids": 1}, {"name": "b", "ids": [1, 2]}],
            {},
            "label 1 belongs to class 'a' and to class 'b'",
        ),
        ([{"name": "a", "ids": 1}, "b"], {}, "label 1 belongs to class 'a' and to class 'b'; give it to one"),
        (["a"], {"ignored": [0]}, "label 0 is ignored, but belongs to class 'a'; remove one of the two"),
        ([{"name": "a", "ids": -1}], {}, '"ids" is -1; give label ids, whole numbers from 0 to 65535'),
        (["a"], {"ignored": ["x"]}, "\"ignored\" is ['x']; give label ids"),
        (["a"], {"masks": "colors"}, '"masks" is \'colors\'; give "labels" or "colours"'),
        (["a"], {"masks": "colours"}, "class 'a' has no \"colour\", which says where it is"),
        ([{"name": "a", "colour": [1, 2, 3], "ids": 4}], {"masks": "colours"}, 'give "mask_colours" instead'),
        ([{"name": "a", "mask_colours": [1, 2, 3]}], {"masks": "colours"}, "is no list of colours"),
        ([{"name": "a", "id": 1}], {}, "is not a class; the form is"),
        (["a"], {"ignore": [1]}, "unknown key 'ignore'"),
    ],
)
def test_mistakes_name_the_file_and_the_class(classes, more, message):
    with pytest.raises(UserError) as error:
        labelling(classes, **more)
    assert str(error.value).startswith("c.json: ")
    assert message in str(error.value)


@given(arrays(st.sampled_from([np.uint8, np.uint16]), (3, 50)))
def test_histograms_count(values):
    counts = histogram(values)
    np.testing.assert_array_equal(counts, np.bincount(values.ravel(), minlength=len(counts)))
    assert distinct(values) == np.unique(values).tolist()


def test_histograms_of_more_pixels_than_a_float_counts():
    assert histogram(np.zeros((4097, 4097), np.uint8))[0] == 4097**2
