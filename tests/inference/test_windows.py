import itertools
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seg4k.errors import UserError
from seg4k.inference.windows import augmented, blend, blocks, cuts, starts, step_of

CPU = torch.device("cpu")


def reference(scores, image, window, overlap):
    """Gaussian blending written out in float64: sigma an eighth of the window, about its middle."""
    size = image.shape[1:]
    axes = [np.arange(side) - (side - 1) / 2 for side in window]
    rows, columns = (
        np.exp(-(axis**2) / (2 * (side / 8) ** 2)) for axis, side in zip(axes, window, strict=True)
    )
    bump = np.outer(rows, columns)
    places = (starts(n, w, step_of(w, overlap)) for n, w in zip(size, window, strict=True))
    total, weight = None, np.zeros(size)
    for top, left in itertools.product(*places):
        inside = (slice(top, top + window[0]), slice(left, left + window[1]))
        one = scores(image[None, :, *inside])[0].double().numpy()
        total = np.zeros((one.shape[0], *size)) if total is None else total
        total[:, *inside] += one * bump
        weight[inside] += bump
    return total / weight


def by_place(window):
    """Scores that depend on where in the window a pixel lies, as those of a network do near its borders."""
    rows = torch.linspace(0, 1, window[0])[:, None]
    columns = torch.linspace(0, 1, window[1])[None]
    return lambda image: torch.stack([image[:, 0] + rows, image[:, 0] * columns], dim=1)


@pytest.mark.parametrize(("size", "overlap"), [((40, 72), 0.25), ((41, 70), 0.5), ((32, 33), 0.25)])
def test_blending_is_the_weighted_mean(size, overlap):
    window = (16, 24)
    image = torch.rand(3, *size, generator=torch.Generator().manual_seed(0))
    for batch in (1, 3):
        got = blend(by_place(window), image, window, overlap, batch, CPU)
        np.testing.assert_allclose(
            got.numpy(), reference(by_place(window), image, window, overlap), atol=1e-5
        )


def test_what_windows_agree_on_is_left_as_it_is():
    image = torch.rand(3, 50, 70)
    got = blend(lambda part: part[:, :2] * 2, image, (16, 16), 0.25, 4, CPU)
    torch.testing.assert_close(got, image[:2] * 2)


def test_seams_are_blended_away():
    """Each window is off by its own constant: the step at its edge is there without overlap only."""
    window, flat = (96, 96), torch.zeros(1, 240, 240)
    generator = torch.Generator().manual_seed(1)

    def offset(part):
        own = torch.rand(len(part), 1, 1, 1, generator=generator.manual_seed(generator.initial_seed() + 1))
        return part + own

    def steepest(overlap):
        result = blend(offset, flat, window, overlap, 1, CPU)[0]
        return max(float(result.diff(dim=axis).abs().max()) for axis in (0, 1))

    assert steepest(0.5) < 0.2 * steepest(0.0)
    assert steepest(0.25) < 0.25 * steepest(0.0)


def test_an_image_smaller_than_the_window():
    image = torch.rand(3, 10, 70)
    got = blend(lambda part: part[:, :1], image, (16, 16), 0.25, 2, CPU)
    torch.testing.assert_close(got, image[:1])


@settings(max_examples=200, deadline=None)
@given(
    length=st.integers(1, 400),
    window=st.integers(1, 60),
    overlap=st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.75, 0.9]),
    longest=st.integers(1, 200),
)
def test_pieces_cover_an_axis_once_and_see_the_windows_of_the_whole(length, window, overlap, longest):
    step = step_of(window, overlap)
    longest = max(longest, 2 * window)
    whole = starts(length, window, step)
    covered = []
    for cut in cuts(length, window, step, longest):
        assert cut.read_start <= cut.keep_start < cut.keep_stop <= cut.read_stop
        own = [cut.read_start + start for start in starts(cut.read_stop - cut.read_start, window, step)]
        assert set(own) <= set(whole)
        for pixel in {cut.keep_start, cut.keep_stop - 1}:
            assert [s for s in own if s <= pixel < s + window] == [
                s for s in whole if s <= pixel < s + window
            ]
        assert cut.read_stop - cut.read_start <= max(longest, 3 * window)
        covered += range(cut.keep_start, cut.keep_stop)
    assert covered == list(range(length))


def test_blocks_give_what_the_whole_gives():
    window, image = (16, 24), torch.rand(3, 100, 130)
    whole = blend(by_place(window), image, window, 0.25, 2, CPU)
    found = blocks((100, 130), window, 0.25, most_pixels=2500)
    assert len(found) > 4
    for read, keep in found:
        part = image[:, read.top : read.top + read.height, read.left : read.left + read.width]
        scores = blend(by_place(window), part, window, 0.25, 2, CPU)
        top, left = keep.top - read.top, keep.left - read.left
        inside = scores[:, top : top + keep.height, left : left + keep.width]
        expected = whole[:, keep.top : keep.top + keep.height, keep.left : keep.left + keep.width]
        torch.testing.assert_close(inside, expected)


def test_mirror_images_and_sizes_are_averaged():
    def scores(image):  # sees where it is, so that each mirror image gives something else
        ramp = torch.arange(image.shape[-1], dtype=torch.float32).expand(image.shape[-2:])
        return image[:, :1] + ramp

    image = torch.rand(2, 3, 8, 6)
    plain = scores(image)
    assert augmented(scores, (), (1.0,)) is scores
    mirrored = augmented(scores, ("horizontal",), (1.0,))(image)
    torch.testing.assert_close(mirrored, image[:, :1] + 2.5)
    torch.testing.assert_close(augmented(scores, ("vertical",), (1.0,))(image), plain)
    both = augmented(scores, ("horizontal", "vertical"), (1.0,))(image)
    torch.testing.assert_close(both, image[:, :1] + 2.5)
    seen = []

    def sizes(image):
        seen.append(tuple(image.shape[-2:]))
        return torch.ones(len(image), 2, *image.shape[-2:])

    result = augmented(sizes, (), (0.5, 1.0, 2.0))(image)
    assert seen == [(4, 3), (8, 6), (16, 12)]
    torch.testing.assert_close(result, torch.ones(2, 2, 8, 6))


def test_without_monai_the_way_on_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "monai.inferers.utils", None)
    with pytest.raises(UserError, match=r"pip install 'seg4k\[predict\]'.*window=whole"):
        blend(lambda part: part, torch.zeros(1, 8, 8), (4, 4), 0.25, 1, CPU)
