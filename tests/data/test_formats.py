import json
import shutil

import numpy as np
import pytest
import torch

from seg4k.data.build import build_datamodule
from seg4k.data.formats import NAMES
from seg4k.data.formats.base import load_format
from seg4k.data.images import read_image
from seg4k.data.rasters import read_raster as layouts_read
from seg4k.errors import UserError
from tests.data import layouts
from tests.data.layouts import LAYOUTS, SIZE, UAVID_COLOURS

# rasterio multiplies transforms in a way that newer versions of affine warn of.
pytestmark = pytest.mark.filterwarnings("ignore:Use `@` matmul:PendingDeprecationWarning")

CITYSCAPES = {7: 0, 8: 1, 11: 2, 12: 3, 13: 4, 17: 5, 19: 6, 20: 7, 21: 8, 22: 9}
CITYSCAPES |= {23: 10, 24: 11, 25: 12, 26: 13, 27: 14, 28: 15, 31: 16, 32: 17, 33: 18}
COCO_UNUSED = {12, 26, 29, 30, 45, 66, 68, 69, 71, 83, 91}  # official ids


def identity(value):
    return value


def coco(value):
    if value == 255 or value + 1 in COCO_UNUSED:
        return 255
    return value - sum(unused <= value + 1 for unused in COCO_UNUSED)


# Each format: its number of classes, names at two places, and the label of each value in a mask.
EXPECTED = {
    "folder": (3, {0: "low", 2: "top"}, identity),
    "geotiff": (3, {0: "low", 2: "top"}, identity),
    "cityscapes": (19, {0: "road", 18: "bicycle"}, lambda value: CITYSCAPES.get(value, 255)),
    "ade20k": (150, {0: "wall", 149: "flag"}, lambda value: value - 1 if value else 255),
    "voc": (21, {0: "background", 20: "tvmonitor"}, identity),
    "coco_stuff": (171, {0: "person", 80: "banner", 170: "wood"}, coco),
    "mapillary": (4, {0: "Bird", 3: "marking--other"}, lambda value: value if value < 4 else 255),
    "uavid": (8, {0: "building", 7: "background clutter"}, identity),
    "loveda": (7, {0: "background", 6: "agricultural"}, lambda value: value - 1 if value else 255),
}


def build(name, root, **config):
    settings = {"name": name, "root": str(root), "image_size": [16, 16], **config}
    return build_datamodule(settings, seed=0, batch_size=2)


@pytest.mark.parametrize("name", NAMES)
def test_a_set_of_each_format_is_read_as_it_was_written(tmp_path, name):
    made = LAYOUTS[name](tmp_path)
    data = build(name, made.root)
    data.setup()
    count, names, label_of = EXPECTED[name]
    assert len(data.class_table) == count
    assert {label: data.class_table.names[label] for label in names} == names
    assert len(data.train_dataset().scenes) == 2
    (val,) = data.val_dataset().scenes
    sample = data.tile_dataset("train")[0]
    raw = made.raw
    if name == "uavid":
        raw = np.argmax((raw[:, :, None] == UAVID_COLOURS).all(-1), axis=-1)
    expected = np.vectorize(label_of)(raw)
    np.testing.assert_array_equal(sample["mask"].numpy(), expected)
    assert 255 in expected or name == "uavid"
    channels = 5 if name == "geotiff" else 3
    assert sample["image"].shape == (channels, *SIZE)
    if name == "geotiff":
        assert sample["image"].dtype == torch.float32
    else:
        np.testing.assert_array_equal(sample["image"].permute(1, 2, 0).numpy(), read_image(made.image))
    assert val.size == SIZE
    batch = next(iter(data.train_dataloader()))
    assert batch["image"].shape == (2, channels, 16, 16)
    assert batch["mask"].dtype == torch.int64
    assert load_format(name).splits(made.root) == ["train", "val"]


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("folder", "geotiff")])
def test_grey_images_of_public_sets_are_repeated_to_three_channels(tmp_path, name):
    made = LAYOUTS[name](tmp_path)
    layouts.picture(made.image, 0, channels=1)  # the first, which says nothing of the others
    data = build(name, made.root)
    assert data.in_channels == 3
    image = data.tile_dataset("train")[0]["image"].numpy()
    np.testing.assert_array_equal(image, np.repeat(read_image(made.image).transpose(2, 0, 1), 3, axis=0))
    assert {batch["image"].shape for batch in data.train_dataloader()} == {(2, 3, 16, 16)}


@pytest.mark.parametrize("name", ["folder", "geotiff"])
def test_grey_images_of_own_sets_are_repeated_where_three_channels_are_set(tmp_path, name):
    made = LAYOUTS[name](tmp_path)
    pixels = np.random.default_rng(0).integers(1, 255, (*SIZE, 3), np.uint8)
    other = made.image.with_stem("b")
    for path, content in ((made.image, pixels[:, :, :1]), (other, pixels), (made.val_image, pixels)):
        layouts.geotiff(path, content)  # OpenCV goes by the content
    data = build(name, made.root, in_channels=3)
    dataset = data.tile_dataset("train")
    np.testing.assert_array_equal(dataset[0]["image"].numpy(), pixels[:, :, [0, 0, 0]].transpose(2, 0, 1))
    np.testing.assert_array_equal(dataset[1]["image"].numpy(), pixels.transpose(2, 0, 1))
    with pytest.raises(UserError, match=r"b.* has 3 channels where 1 are .* set data.in_channels=3, which"):
        list(build(name, made.root).train_dataloader())
    layouts.geotiff(made.image, pixels[:, :, :1].astype(np.uint16))
    layouts.geotiff(other, pixels.astype(np.uint16))
    with pytest.raises(UserError, match="has 1 channels where 3 are"):
        list(build(name, made.root, in_channels=3).train_dataloader())


def test_lists_name_the_images_of_a_folder(tmp_path):
    data = build("folder", layouts.listed(tmp_path).root)
    data.setup()
    assert [scene.name for scene in data.train_dataset().scenes] == ["x/a", "b"]
    assert [scene.name for scene in data.val_dataset().scenes] == ["c"]
    (tmp_path / "train.txt").write_text("x/a\nzz.png\n")
    with pytest.raises(UserError, match=r"train.txt, line 2: there is no image zz; correct the line"):
        build("folder", tmp_path).setup()
    (tmp_path / "train.txt").write_text("x/a\nx/a.jpg\n")
    with pytest.raises(UserError, match=r"train.txt, line 2: x/a stands there twice; remove one"):
        build("folder", tmp_path).setup()
    (tmp_path / "train.txt").write_text("\n")
    with pytest.raises(UserError, match=r"train.txt is empty; write the name of one image a line"):
        build("folder", tmp_path)


@pytest.mark.parametrize("name", ["folder", "geotiff"])
def test_notes_beside_the_folders_are_no_split(tmp_path, name):
    made = LAYOUTS[name](tmp_path)
    (tmp_path / "README.txt").write_text("These are our images\nof 2024\n")
    assert load_format(name).splits(tmp_path) == ["train", "val"]
    build(name, made.root).setup()
    for kind in ("images", "masks"):
        shutil.rmtree(tmp_path / kind / "train")
    assert build(name, made.root).in_channels == (5 if name == "geotiff" else 3)  # to evaluate on val


def test_notes_beside_the_lists_are_no_split(tmp_path):
    layouts.listed(tmp_path)
    (tmp_path / "README.txt").write_bytes("Größe der Bilder\n".encode("latin-1"))
    (tmp_path / "more.txt").write_text("b\n")
    assert load_format("folder").splits(tmp_path) == ["more", "train", "val"]
    (tmp_path / "train.txt").write_text("These are our images\n")
    with pytest.raises(UserError, match=r"train.txt, line 1: there is no image These .*; correct the line"):
        build("folder", tmp_path)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("folder", "geotiff")])
def test_an_empty_folder_says_what_belongs_there(tmp_path, name):
    with pytest.raises(UserError, match=r"(?i)train|\.json|JPEGImages"):
        build(name, tmp_path).setup()
    with pytest.raises(UserError, match=f"data={name} needs a folder: set data.root=FOLDER; in it are"):
        build_datamodule({"name": name, "image_size": [16, 16]}, seed=0, batch_size=1)


@pytest.mark.parametrize("name", NAMES)
def test_values_without_a_class_are_named(tmp_path, name):
    made = LAYOUTS[name](tmp_path)
    made.write(made.mask, made.stray)
    wrong = r"colour \(1, 2, 3\), which no class has" if name == "uavid" else r"label \d+,? "
    with pytest.raises(UserError, match=f"The mask {made.mask} holds the {wrong}"):
        build(name, made.root).tile_dataset("train")[0]


def test_an_own_class_file_merges_and_ignores(tmp_path):
    made = LAYOUTS["cityscapes"](tmp_path)
    classes = [
        {"name": "flat", "colour": [128, 64, 128], "ids": [7, 8]},
        {"name": "vehicle", "colour": [0, 0, 142], "ids": [26, 27, 28, 31, 32, 33]},
    ]
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"classes": classes, "ignored": "others", "ignore_index": 200}))
    data = build("cityscapes", made.root, class_file=str(path))
    assert data.class_table.names == ("flat", "vehicle")
    mask = data.tile_dataset("train")[0]["mask"].numpy()
    expected = np.full(SIZE, 200)
    expected[np.isin(made.raw, [7, 8])] = 0
    expected[np.isin(made.raw, [26, 27, 28, 31, 32, 33])] = 1
    np.testing.assert_array_equal(mask, expected)


def test_sixteen_bit_masks_of_many_labels(tmp_path):
    made = LAYOUTS["folder"](tmp_path)
    labels = layouts.values(range(60000), dtype=np.uint16)
    for path in (made.mask, made.other):
        layouts.grey(path, labels)
    names = [str(number) for number in range(60000)]
    (tmp_path / "classes.json").write_text(json.dumps({"classes": names, "ignore_index": 65535}))
    sample = build("folder", made.root).tile_dataset("train")[0]
    np.testing.assert_array_equal(sample["mask"].numpy(), labels)
    crop = next(iter(build("folder", made.root, image_size=[64, 64]).train_dataloader()))
    assert (crop["mask"] == 65535).any()  # beyond the image
    layouts.grey(made.mask, np.full(SIZE, 65534, np.uint16))
    with pytest.raises(UserError, match="holds the label 65534"):
        build("folder", made.root).tile_dataset("train")[0]


def test_mapillary_of_the_first_release(tmp_path):
    for split, name in (("training", "a"), ("validation", "b")):
        layouts.picture(tmp_path / split / "images" / f"{name}.jpg", 0)
        layouts.grey(tmp_path / split / "labels" / f"{name}.png", layouts.values([0, 4], dtype=np.uint16))
    (tmp_path / "config.json").write_text(json.dumps({"labels": layouts.MAPILLARY_LABELS}))
    sample = build("mapillary", tmp_path).tile_dataset("train")[0]
    assert set(np.unique(sample["mask"].numpy())) == {0, 255}
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UserError, match=r'config.json is no list of "labels" with "name" and "color"'):
        build("mapillary", tmp_path)


def test_without_data_the_label_is_ignored(tmp_path):
    made = LAYOUTS["geotiff"](tmp_path)
    pixels = np.random.default_rng(0).integers(1, 9, (40, 70, 2), np.uint8)
    pixels[:, :10] = 0
    labels = layouts.values([0, 1, 2], size=(40, 70))
    labels[5] = 77  # nodata of the mask: not a mistake
    for image, mask in ((made.image, made.mask), (made.root / "images/train/b.tif", made.other)):
        layouts.geotiff(image, pixels, nodata=0)
        layouts.geotiff(mask, labels, nodata=77)
    data = build("geotiff", made.root)
    mask = data.tile_dataset("train")[0]["mask"].numpy()
    assert (mask[:, :10] == 255).all()
    assert (mask[5] == 255).all()
    np.testing.assert_array_equal(np.delete(mask, 5, 0)[:, 10:], np.delete(labels, 5, 0)[:, 10:])


def test_without_data_values_need_no_class(tmp_path):
    """Of classes whose first value no mask of 8 bits can hold, and where all of a scene is without data."""
    made = LAYOUTS["geotiff"](tmp_path)
    classes = [{"name": "far", "ids": [1000, 0]}, {"name": "b", "ids": 1}, {"name": "c", "ids": 2}]
    (tmp_path / "classes.json").write_text(json.dumps({"classes": classes}))
    pixels = np.ones((*SIZE, 3), np.uint8)
    pixels[:4] = 0
    layouts.geotiff(made.image, pixels, nodata=0)
    layouts.geotiff(made.mask, np.maximum(made.raw, 77 * (pixels[:, :, 0] == 0)).astype(np.uint8))
    layouts.geotiff(made.image.with_stem("b"), 0 * pixels, nodata=0)
    first, second = (build("geotiff", made.root).tile_dataset("train")[i]["mask"].numpy() for i in (0, 1))
    np.testing.assert_array_equal(first[4:], made.raw[4:])
    assert (first[:4] == 255).all()
    assert (second == 255).all()
    assert first.dtype == second.dtype == np.uint8


def test_a_scene_is_read_by_windows(tmp_path, monkeypatch):
    made = LAYOUTS["geotiff"](tmp_path)
    size = (300, 500)
    image = np.random.default_rng(1).integers(1, 60000, (*size, 5), np.uint16)
    labels = np.zeros(size, np.uint8)
    labels[250:260, 420:430] = 2
    for stem in ("a", "b"):
        layouts.geotiff(made.root / f"images/train/{stem}.tif", image)
        layouts.geotiff(made.root / f"masks/train/{stem}.tif", labels)
    monkeypatch.setattr("seg4k.data.raster_scenes.BLOCK", 64)
    data = build("geotiff", made.root, rare_crop_share=1.0, rare_classes=["top"], augment=None)
    dataset = data.train_dataset()
    read = []
    monkeypatch.setattr(
        "seg4k.data.raster_scenes.read_raster",
        lambda raster, window, real=layouts_read: read.append(window[2:]) or real(raster, window),
    )
    places = set()
    for index in range(60):
        sample = dataset[0, index]
        assert (sample["mask"] == 2).any()
        top, left = map(int, sample["name"].rpartition("@")[2].split(","))
        expected = image[top : top + 16, left : left + 16].astype(np.float32) / np.float32(65535)
        np.testing.assert_array_equal(sample["image"].permute(1, 2, 0).numpy(), expected)
        places.add((top, left))
    assert len(places) > 30
    assert max(height * width for height, width in read) <= 64 * 64


def test_scenes_of_geotiff_that_do_not_fit(tmp_path):
    made = LAYOUTS["geotiff"](tmp_path)
    layouts.geotiff(made.mask, np.zeros((8, 8), np.uint8))
    with pytest.raises(UserError, match=r"masks/train/a.tif is 8x8 but its image .*a.tif is 32x24"):
        build("geotiff", made.root).setup()
    layouts.geotiff(made.mask, np.zeros((*SIZE, 3), np.uint8))
    with pytest.raises(UserError, match=r"a.tif has 3 band\(s\) of 8 bits where 1 are expected"):
        build("geotiff", made.root).setup()
    layouts.geotiff(made.mask, np.zeros(SIZE, np.float32))
    with pytest.raises(UserError, match=r"a.tif holds float32 values; save all bands with 8 or 16 bits"):
        build("geotiff", made.root).setup()


def test_a_folder_of_many_channels(tmp_path):
    made = LAYOUTS["folder"](tmp_path)
    for path in (made.image, made.root / "images/train/b.png"):
        path.unlink()
        pixels = np.random.default_rng(0).integers(1, 60000, (*SIZE, 6), np.uint16)
        layouts.geotiff(path.with_suffix(".tif"), pixels)
    data = build("folder", made.root)
    assert data.in_channels == 6
    np.testing.assert_array_equal(read_image(made.image.with_suffix(".tif")), pixels)
    assert data.train_dataset()[0, 0]["image"].shape == (6, 16, 16)
