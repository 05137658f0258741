import collections

import numpy as np
import pytest

from seg4k.data.sampling import sample_generator
from seg4k.data.transforms import Augment, Transform
from seg4k.errors import UserError


def apply(augment, image, mask, index=0):
    return Transform(augment, mask.shape)(image.copy(), mask.copy(), sample_generator(0, 0, index))


@pytest.fixture
def pair():
    image = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    return image, image[:, :, 1].copy()


def test_geometry_moves_image_and_mask_alike(pair):
    augment = Augment(hflip=0.5, vflip=0.5, rotate90=1.0)
    seen = set()
    for index in range(100):
        image, mask = apply(augment, *pair, index)
        np.testing.assert_array_equal(image[:, :, 1], mask)
        seen.add(mask.tobytes())
    assert len(seen) == 8  # all symmetries of the square


def test_flips_are_independent_of_each_other(pair):
    transform = Transform(Augment(hflip=0.5, vflip=0.5), (16, 16))
    ways = {
        pair[1].tobytes(): "none",
        pair[1][:, ::-1].tobytes(): "left",
        pair[1][::-1].tobytes(): "down",
        pair[1][::-1, ::-1].tobytes(): "both",
    }
    counts = collections.Counter(
        ways[transform(*pair, sample_generator(0, 0, i))[1].tobytes()] for i in range(800)
    )
    assert len(counts) == 4
    assert all(140 < n < 260 for n in counts.values())  # 200 +- 5 standard deviations


def test_crops_that_are_not_square_are_turned_by_half(pair):
    image, mask = pair[0][:10], pair[1][:10]
    seen = {apply(Augment(rotate90=1.0), image, mask, i)[1].tobytes() for i in range(40)}
    assert seen == {mask.tobytes(), mask[::-1, ::-1].tobytes()}


@pytest.mark.parametrize("channels", [1, 2, 4, 7])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_geometry_works_with_any_channels(channels, dtype):
    image = np.random.default_rng(0).integers(0, 255, (12, 12, channels)).astype(dtype)
    for index in range(8):
        moved, mask = apply(Augment(hflip=0.5, vflip=0.5, rotate90=1.0), image, image[:, :, 0], index)
        assert moved.dtype == dtype
        np.testing.assert_array_equal(moved[:, :, 0], mask)


def test_colours_change_and_the_mask_does_not(pair):
    augment = Augment(colour=1.0, brightness=0.2, contrast=0.2, saturation=0.2, hue=0.02)
    image, mask = apply(augment, *pair)
    assert image.dtype == np.uint8
    assert 1 < np.abs(image.astype(int) - pair[0]).mean() < 60
    np.testing.assert_array_equal(mask, pair[1])


def test_brightness_is_within_its_range(pair):
    grey = np.full((16, 16, 3), 100, np.uint8)
    values = [apply(Augment(colour=1.0, brightness=0.2), grey, pair[1], i)[0].mean() for i in range(50)]
    assert 80 <= min(values) < 85
    assert 115 < max(values) <= 120


def test_nothing_to_do_is_known():
    assert not Augment().transforms
    assert not Augment(colour=0.5).transforms
    assert not Augment(scale=(0.5, 2)).transforms
    assert Augment(colour=0.5, hue=0.1).transforms
    assert Augment.from_config(None) == Augment()
    assert Augment.from_config({"scale": [0.5, 2], "hflip": 1}) == Augment(scale=(0.5, 2.0), hflip=1)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hfilp": 0.5}, "Unknown key data.augment.hfilp; did you mean 'hflip'"),
        ({"zzz": 0.5}, "Unknown key data.augment.zzz; the keys are hflip"),
        ({"hflip": 1.5}, "data.augment.hflip is 1.5; give a number from 0 to 1"),
        ({"hflip": True}, "data.augment.hflip is True"),
        ({"hue": 0.7}, "number from 0 to 0.5"),
        ({"scale": 2}, "data.augment.scale is 2; give"),
        ({"scale": [2, 1]}, "data.augment.scale"),
        ({"scale": [0, 1]}, "data.augment.scale"),
        ([1], "give keys and values"),
    ],
)
def test_wrong_settings_are_named(config, message):
    with pytest.raises(UserError, match=message):
        Augment.from_config(config)
