import cv2
import numpy as np
import pytest

from seg4k.data.classes import ClassTable
from seg4k.data.formats import base, folder
from seg4k.data.images import read_image, read_mask
from seg4k.data.labels import Labelling
from seg4k.data.scenes import PairReader, Window, read_window
from seg4k.errors import UserError

from .conftest import write

TABLE = ClassTable.from_names(["low", "high", "top"])
LABELS = Labelling(TABLE)


def scenes(root, split="train", reader=None):
    return base.scenes(folder, root, split, reader or PairReader(LABELS, 3))


def test_pairs_are_found_by_their_names(make_folder):
    root = make_folder(train=3)
    (root / "images/train/.hidden.png").write_text("")
    (root / "images/train/notes.txt").write_text("")
    found = scenes(root)
    assert [scene.name for scene in found] == ["train0", "train1", "train2"]
    assert folder.labelling(root).table.names == TABLE.names
    for scene in found:
        image, mask = scene.arrays()
        assert scene.size == (40, 56)
        np.testing.assert_array_equal(image, read_image(root / f"images/train/{scene.name}.png"))
        np.testing.assert_array_equal(mask, read_mask(root / f"masks/train/{scene.name}.png"))
        places = {scene.place(2, np.random.default_rng(seed)) for seed in range(200)}
        assert {int(mask[place]) for place in places} == {2}
        assert len(places) > 5
        assert scene.labels() == set(np.unique(mask).tolist())


def test_image_and_mask_may_have_other_suffixes(make_folder):
    root = make_folder(train=1)
    image = read_image(root / "images/train/train0.png")
    (root / "images/train/train0.png").unlink()
    write(root / "images/train/train0.JPG", image)
    assert scenes(root)[0].arrays()[0].shape == image.shape


@pytest.mark.parametrize(("top", "left"), [(0, 0), (-5, 3), (30, 50), (-100, 0), (5, -60)])
def test_windows_beyond_the_image_are_black_and_ignored(make_folder, top, left):
    scene = scenes(make_folder(train=1))[0]
    image, mask = scene.arrays()
    wide = np.pad(image, ((200, 200), (200, 200), (0, 0)))
    wide_mask = np.pad(mask, 200, constant_values=255)
    got, got_mask = read_window(scene, Window(top, left, 64, 48), 255)
    inside = slice(200 + top, 264 + top), slice(200 + left, 248 + left)
    np.testing.assert_array_equal(got, wide[inside])
    np.testing.assert_array_equal(got_mask, wide_mask[inside])


def test_one_pair_is_kept_decoded(make_folder, monkeypatch):
    found = scenes(make_folder(train=2))
    decoded = []
    monkeypatch.setattr("seg4k.data.scenes.read_image", lambda p: decoded.append(p.stem) or read_image(p))
    for scene in (found[0], found[0], found[1], found[1], found[0]):
        scene.arrays()
    assert decoded == ["train0", "train1", "train0"]


# Each fault, what does it, and what the message says: the file and the way to mend it.
FAULTS = {
    "missing split": (lambda r: (r / "images/train").rename(r / "other"), "images/train does not exist"),
    "empty split": (lambda r: [p.unlink() for p in (r / "images/train").iterdir()], "holds no .png/.jpg"),
    "no masks": (lambda r: (r / "masks/train").rename(r / "other"), "masks/train does not exist"),
    "no mask": (
        lambda r: (r / "masks/train/train1.png").unlink(),
        r"images/train/train1.png has no mask; add .*masks/train/train1.png, or remove the image",
    ),
    "two without masks": (
        lambda r: [(r / f"masks/train/train{i}.png").unlink() for i in (1, 2)],
        r"train1.png \(and 1 more images\) has no mask",
    ),
    "mask as JPEG": (
        lambda r: cv2.imwrite(str((r / "masks/train/train1.png").replace(r / "masks/train/train1.jpg")), _M),
        r"train1.png has no mask; add .*train1.png",
    ),
    "same name": (
        lambda r: write(r / "images/train/train0.tif", np.zeros((40, 56, 3), np.uint8)),
        "train0.png and .*train0.tif have the same name",
    ),
    "size": (
        lambda r: write(r / "masks/train/train1.png", np.zeros((40, 55), np.uint8)),
        r"masks/train/train1.png is 55x40 but its image .*images/train/train1.png is 56x40 .*; make",
    ),
    "unreadable": (
        lambda r: (r / "images/train/train1.png").write_text("oops"),
        r"images/train/train1.png cannot be decoded .*; restore, convert or remove",
    ),
}
_M = np.zeros((40, 56), np.uint8)


@pytest.mark.parametrize(("damage", "message"), FAULTS.values(), ids=FAULTS.keys())
def test_faults_that_are_seen_at_the_start(make_folder, damage, message):
    root = make_folder()
    damage(root)
    with pytest.raises(UserError, match=message):
        scenes(root)


def test_labels_outside_the_classes_are_named_when_read(make_folder):
    root = make_folder(train=1)
    mask = read_mask(root / "masks/train/train0.png")
    mask[0, 0], mask[3, 3], mask[4, 4] = 255, 3, 17
    write(root / "masks/train/train0.png", mask)
    scene = scenes(root)[0]
    message = (
        r"train0.png holds the label 3, 17, but the classes are 0 to 2 and 255 is ignored; correct the mask"
    )
    with pytest.raises(UserError, match=message):
        scene.arrays()
    with pytest.raises(UserError, match=message):
        scene.labels()


def test_channels_and_bits_are_those_of_the_set(make_folder):
    root = make_folder(train=1, channels=4)
    with pytest.raises(UserError, match=r"train0.png has 4 channels where 3 are .*data.in_channels=4"):
        scenes(root)[0].arrays()
    deep = PairReader(LABELS, 4, np.dtype(np.uint16))
    with pytest.raises(UserError, match=r"train0.png has 8 bits per channel where the first image has 16"):
        scenes(root, reader=deep)[0].arrays()


def test_a_file_that_changes_its_size_later_is_named(make_folder):
    root = make_folder(train=1)
    scene = scenes(root)[0]
    write(root / "images/train/train0.png", np.zeros((8, 8, 3), np.uint8))
    write(root / "masks/train/train0.png", np.zeros((8, 8), np.uint8))
    with pytest.raises(UserError, match=r"train0.png has changed its size"):
        scene.arrays()


def test_labels_above_255(make_folder):
    root = make_folder(train=1)
    mask = np.full((40, 56), 299, np.uint16)
    mask[0] = 65535
    write(root / "masks/train/train0.png", mask)
    many = Labelling(ClassTable.from_names([str(i) for i in range(300)], ignore_index=65535))
    assert scenes(root, reader=PairReader(many, 3))[0].labels() == {299, 65535}
    write(root / "masks/train/train0.png", np.full((40, 56), 7, np.uint8))
    # Small masks are widened, since crops must be able to hold the ignored label.
    assert scenes(root, reader=PairReader(many, 3))[0].arrays()[1].dtype == np.uint16
