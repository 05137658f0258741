import json
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seg4k.data.classes import ClassTable
from seg4k.errors import UserError

colours = st.tuples(*[st.integers(0, 255)] * 3)
tables = st.lists(
    st.tuples(st.text(min_size=1).filter(str.strip), colours),
    min_size=1,
    max_size=20,
    unique_by=lambda c: c[0],
).map(lambda rows: ClassTable(tuple(r[0] for r in rows), tuple(r[1] for r in rows), 200))


@given(tables)
def test_a_table_survives_plain_values_and_json(table):
    assert ClassTable.from_dict(table.to_dict()) == table
    assert ClassTable.from_dict(json.loads(json.dumps(table.to_dict()))) == table


def test_pictures_have_the_class_colours():
    table = ClassTable(("a", "b"), ((1, 2, 3), (4, 5, 6)))
    labels = np.array([[0, 1], [255, 7]], np.uint8)
    painted = table.to_rgb(labels, ignored=(9, 9, 9))
    assert painted.dtype == np.uint8
    assert painted.tolist() == [[[1, 2, 3], [4, 5, 6]], [[9, 9, 9], [9, 9, 9]]]


def test_many_classes_have_16_bit_labels():
    table = ClassTable.from_names([f"class {i}" for i in range(300)], ignore_index=65535)
    assert table.to_rgb(np.array([[299, 65535]], np.uint16))[0].tolist() == [
        list(table.colours[299]),
        [0, 0, 0],
    ]
    with pytest.raises(UserError, match="is the label of class 'class 255'; choose one from 300"):
        ClassTable.from_names([f"class {i}" for i in range(300)])


def test_as_many_classes_as_masks_can_hold_take_no_time():
    started = time.process_time()
    assert len(ClassTable.from_names([str(i) for i in range(65_535)], ignore_index=65535)) == 65_535
    assert time.process_time() - started < 10  # a minute, if each name were sought among all


def test_colours_that_are_not_given_are_all_different():
    assert len(set(ClassTable.from_names([str(i) for i in range(60)]).colours)) == 60


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("c.json", '{"classes": [{"name": "a", "colour": [1, 2, 3]}, {"name": "b", "colour": [4, 5, 6]}]}'),
        ("c.json", '[{"name": "a", "colour": [1, 2, 3]}, {"name": "b", "colour": [4, 5, 6]}]'),
        ("c.csv", "# name, red, green, blue\na,1,2,3\n\nb, 4, 5, 6\n"),
    ],
)
def test_class_files(tmp_path, file, text):
    (tmp_path / file).write_text(text)
    assert ClassTable.from_file(tmp_path / file) == ClassTable(("a", "b"), ((1, 2, 3), (4, 5, 6)))


def test_names_alone_are_enough(tmp_path):
    (tmp_path / "c.txt").write_text("road\ngrass\n")
    assert ClassTable.from_file(tmp_path / "c.txt").names == ("road", "grass")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("3", "holds no classes"),
        ('{"classes": []}', "is empty"),
        ('{"names": ["a"]}', "unknown key 'names'"),
        ("{}", "no list under"),
        ('{"classes": ["a", "a"]}', "'a' is given more than once"),
        ('{"classes": [{"name": "a", "color": [1, 2, 3]}]}', "is not a class"),
        ('{"classes": [{"name": "a", "colour": [1, 2]}]}', r"has the colour \[1, 2\]"),
        ('{"classes": [{"name": "a", "colour": [1, 2, 256]}]}', r"has the colour \[1, 2, 256\]"),
        ('{"classes": [{"name": "a", "colour": 7}]}', r"has the colour \[7\]"),
        ('{"classes": [{"name": "a", "colour": [1, 2, 3]}, "b"]}', "2 names and 1 colours"),
        ('{"classes": ["a", ""]}', "Class 1 has the name ''"),
        ('{"classes": ["a", "b"], "ignore_index": 1}', "is the label of class 'b'"),
        ('{"classes": ["a", "b"], "ignore_index": -1}', "from 0 to 65535"),
        ('{"classes": ["a", "b"], "ignore_index": "x"}', "from 0 to 65535"),
    ],
)
def test_wrong_class_files_name_the_file_and_the_fault(tmp_path, text, message):
    path = tmp_path / "classes.json"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as error:
        ClassTable.from_file(path)
    assert str(path) in str(error.value)


def test_a_wrong_line_is_named(tmp_path):
    (tmp_path / "c.csv").write_text("a,1,2,3\nb,1,red,3\n")
    with pytest.raises(UserError, match="line 2"):
        ClassTable.from_file(tmp_path / "c.csv")


def test_a_missing_class_file_shows_the_form(tmp_path):
    with pytest.raises(UserError, match=r'does not exist; write it as \{"classes"'):
        ClassTable.from_file(tmp_path / "classes.json")


def test_unknown_names_get_close_ones():
    table = ClassTable.from_names(["ocean", "land", "lake"])
    assert table.index("lake") == 2
    with pytest.raises(UserError, match="did you mean 'lake'"):
        table.index("lakes")
