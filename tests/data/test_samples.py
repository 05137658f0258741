import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seg4k.data.samples import CropDataset, TileDataset, find_rare, tile_windows, to_sample
from seg4k.data.sampling import PADDING
from seg4k.data.scenes import crop, random_place
from seg4k.data.transforms import Augment
from seg4k.errors import UserError


class Memory:
    """A scene in memory, whose pixels tell where they are."""

    def __init__(self, name, height, width, rare=()):
        self.name, self.size = name, (height, width)
        rows, columns = np.mgrid[:height, :width]
        self.image = np.stack([rows, columns, rows + columns], 2).astype(np.uint8)
        self.labels_ = np.zeros((height, width), np.uint8)
        for row, column, label in rare:
            self.labels_[row, column] = label

    def inside(self, window):
        return crop(self.image, window), crop(self.labels_, window)

    def labels(self):
        return set(np.unique(self.labels_).tolist())

    def place(self, label, generator):
        return random_place(np.flatnonzero(self.labels_ == label), self.size[1], generator)


def crops(scenes, size, **options):
    return CropDataset(scenes, size, **{"seed": 0, "augment": Augment(), "ignore_index": 255, **options})


@given(
    st.tuples(st.integers(1, 60), st.integers(1, 60)),
    st.tuples(st.integers(1, 70), st.integers(1, 70)),
)
def test_tiles_cover_every_pixel_once(size, tile):
    covered = np.zeros((size[0] + tile[0], size[1] + tile[1]), int)
    for top, left, height, width in tile_windows(size, tile):
        assert (height, width) == tile
        covered[top : top + height, left : left + width] += 1
    assert (covered[: size[0], : size[1]] == 1).all()
    assert covered.max() == 1
    assert tile_windows(size, None) == [(0, 0, *size)]


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=3),
    st.tuples(st.integers(1, 50), st.integers(1, 50)),
)
def test_tiles_hold_each_pixel_and_ignore_the_rest(sizes, tile):
    scenes = [Memory(str(i), *size) for i, size in enumerate(sizes)]
    dataset = TileDataset(scenes, tile, ignore_index=255)
    valid = 0
    for index in range(len(dataset)):
        sample = dataset[0, index]
        assert sample["image"].shape == (3, *tile)
        assert sample["mask"].shape == tile
        kept = sample["mask"] != 255
        valid += int(kept.sum())
        assert not sample["image"][:, ~kept].any()
    assert valid == sum(h * w for h, w in sizes)
    padding = dataset[0, PADDING]
    assert (padding["mask"] == 255).all()
    assert padding["image"].shape == (3, *tile)


@given(
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.tuples(st.integers(1, 50), st.integers(1, 50)),
    st.integers(0, 5),
    st.integers(0, 100),
)
def test_crops_lie_within_the_scene_or_hold_all_of_it(size, crop, epoch, index):
    scene = Memory("a", *size)
    sample = crops([scene], crop)[epoch, index]
    assert sample["image"].shape == (3, *crop)
    kept = (sample["mask"] != 255).numpy()
    assert kept.sum() == min(size[0], crop[0]) * min(size[1], crop[1])
    top, left = map(int, sample["name"].split("@")[1].split(","))
    rows, columns = np.nonzero(kept)
    assert (sample["image"][0].numpy()[kept] == top + rows).all()
    assert (sample["image"][1].numpy()[kept] == left + columns).all()


def test_crops_reach_every_corner():
    scene = Memory("a", 9, 9)
    places = {crops([scene], (4, 4))[0, i]["name"] for i in range(1000)}
    assert len(places) == 36  # starts 0 to 5 in both directions


def test_scenes_take_turns_within_an_epoch():
    scenes = [Memory(str(i), 8, 8) for i in range(7)]
    dataset = crops(scenes, (4, 4))
    names = [[dataset[e, i]["name"][0] for i in range(21)] for e in range(2)]
    for order in names:
        assert [sorted(order[i : i + 7]) for i in (0, 7, 14)] == [list("0123456")] * 3
    assert names[0] != names[1]


@given(st.integers(0, 3), st.integers(0, 50))
def test_a_sample_depends_on_its_key_alone(epoch, index):
    scenes = [Memory(str(i), 30, 40, rare=[(3, 3, 1)]) for i in range(5)]
    options = {
        "augment": Augment(hflip=0.5, vflip=0.5, rotate90=0.7, scale=(0.5, 2)),
        "rare_share": 0.5,
        "rare_scenes": {1: [0, 1, 2, 3, 4]},
    }
    used, fresh = crops(scenes, (8, 8), **options), crops(scenes, (8, 8), **options)
    for other in range(3):
        used[other, index + 1]
    first, second = used[epoch, index], fresh[epoch, index]
    assert first["name"] == second["name"]
    assert torch.equal(first["image"], second["image"])
    assert torch.equal(first["mask"], second["mask"])


@given(st.tuples(st.integers(0, 29), st.integers(0, 39)), st.integers(1, 35), st.integers(1, 45))
def test_rare_crops_hold_their_pixel(place, height, width):
    scene = Memory("a", 30, 40, rare=[(*place, 1)])
    dataset = crops([scene], (height, width), rare_share=1.0, rare_scenes={1: [0]})
    for index in range(5):
        assert (dataset[0, index]["mask"] == 1).sum() == 1


def test_rare_crops_have_their_share_and_jitter():
    scene = Memory("a", 400, 400, rare=[(200, 200, 1)])
    dataset = crops([scene], (20, 20), rare_share=0.4, rare_scenes={1: [0]})
    places = [np.argwhere(dataset[0, i]["mask"].numpy() == 1) for i in range(1000)]
    rare = np.array([p[0] for p in places if len(p)])
    # By chance alone a crop holds the pixel in 1 of 360. Binomial: 400 +- 4.5 standard deviations of 15.5.
    assert 330 < len(rare) < 475
    middle = ((rare >= 5) & (rare <= 15)).all(1)
    assert middle.mean() > 0.97
    assert len({tuple(p) for p in rare}) > 50


def test_rare_classes_are_drawn_evenly_whatever_their_area():
    scenes = [
        Memory("a", 50, 50, rare=[(r, c, 1) for r in range(50) for c in range(25)]),
        Memory("b", 50, 50),
    ]
    scenes[1].labels_[10, 10] = 2
    rare = find_rare(scenes, {"big": 1, "small": 2})
    assert rare == {1: [0], 2: [1]}
    dataset = crops(scenes, (4, 4), rare_share=1.0, rare_scenes=rare)
    names = [dataset[0, i]["name"][0] for i in range(400)]
    assert 150 < names.count("b") < 250
    with pytest.raises(UserError, match="rare class 'none' is in no training mask"):
        find_rare(scenes, {"none": 3})


def test_zoom_keeps_image_and_mask_together():
    scene = Memory("a", 200, 200)
    scene.labels_ = (scene.image[:, :, 1] // 20).astype(np.uint8)
    dataset = crops([scene], (32, 32), augment=Augment(scale=(0.5, 2.0)))
    widths = set()
    for index in range(60):
        sample = dataset[0, index]
        columns = sample["image"][1].numpy().astype(float)
        widths.add(round(float(columns[0, -1] - columns[0, 0])))
        away = np.abs(columns % 20 - 10) < 8  # two pixels from an edge of the labels both must agree
        assert (sample["mask"].numpy()[away] == columns[away] // 20).all()
    assert min(widths) < 20
    assert max(widths) > 50


def test_16_bit_images_become_floats_and_wide_masks_integers():
    image = np.array([[[0], [65535]]], np.uint16)
    sample = to_sample(image, np.array([[256, 65535]], np.uint16), "a")
    assert sample["image"].dtype == torch.float32
    assert sample["image"].tolist() == [[[0.0, 1.0]]]
    assert sample["mask"].dtype == torch.int32
    assert sample["mask"].tolist() == [[256, 65535]]
