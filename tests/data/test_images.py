import struct
import sys
import zlib

import cv2
import numpy as np
import pytest
from PIL import Image

from seg4k.data.images import header_size, read_image, read_mask
from seg4k.errors import UserError

from .conftest import write


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_images_are_read_as_they_were_written(tmp_path, dtype, channels, suffix):
    image = np.random.default_rng(0).integers(0, np.iinfo(dtype).max, (9, 13, channels), dtype=dtype)
    write(tmp_path / f"a.{suffix}", image)
    read = read_image(tmp_path / f"a.{suffix}")
    assert read.dtype == dtype
    np.testing.assert_array_equal(read, image)
    assert header_size(tmp_path / f"a.{suffix}") == (9, 13)


def test_colours_are_red_green_blue_as_another_library_sees_them(tmp_path):
    image = np.zeros((8, 8, 3), np.uint8)
    image[:, :, 0] = 250
    Image.fromarray(image).save(tmp_path / "red.png")
    Image.fromarray(image).save(tmp_path / "red.jpg", quality=95)
    np.testing.assert_array_equal(read_image(tmp_path / "red.png"), image)
    assert np.abs(read_image(tmp_path / "red.jpg").astype(int) - image).max() < 8


def test_masks_keep_16_bit_labels(tmp_path):
    mask = np.array([[0, 255], [256, 65535]], np.uint16)
    cv2.imwrite(str(tmp_path / "m.png"), mask)
    np.testing.assert_array_equal(read_mask(tmp_path / "m.png"), mask)


def test_masks_of_colours_are_refused(tmp_path):
    write(tmp_path / "colours.png", np.zeros((4, 5, 3), np.uint8))
    with pytest.raises(UserError, match=r"colours\.png has 3 channels \(colours\); .* one class number per"):
        read_mask(tmp_path / "colours.png")


@pytest.mark.parametrize("suffix", ["png", "jpg", "tif"])
@pytest.mark.parametrize("share", [0.0, 0.4, 0.99])
def test_files_cut_short_are_named(tmp_path, suffix, share):
    path = tmp_path / f"cut.{suffix}"
    image = cv2.GaussianBlur(np.random.default_rng(0).integers(0, 255, (80, 90, 3), np.uint8), (0, 0), 2)
    write(path, image)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    what = "is empty" if share == 0 else "cannot be decoded .*"
    with pytest.raises(UserError, match=rf"cut\.{suffix} {what}.* remove the file"):
        read_image(path)


def test_missing_files_and_other_files_are_named(tmp_path):
    with pytest.raises(UserError, match=r"gone\.png cannot be read \(No such file"):
        read_image(tmp_path / "gone.png")
    (tmp_path / "notes.png").write_text("no image at all")
    with pytest.raises(UserError, match=r"notes\.png cannot be decoded"):
        read_image(tmp_path / "notes.png")
    assert header_size(tmp_path / "notes.png") is None
    assert header_size(tmp_path / "gone.png") is None


def test_floating_point_images_are_refused(tmp_path):
    cv2.imwrite(str(tmp_path / "f.tif"), np.ones((4, 4), np.float32))
    with pytest.raises(UserError, match=r"f\.tif holds float32 values; save it with 8 or 16 bits"):
        read_image(tmp_path / "f.tif")


def test_more_channels_than_opencv_reads_need_rasterio(tmp_path, monkeypatch):
    (tmp_path / "six.tif").write_bytes(_tiff(np.zeros((5, 7, 6), np.uint8)))
    assert read_image(tmp_path / "six.tif").shape == (5, 7, 6)
    monkeypatch.setitem(sys.modules, "rasterio", None)
    with pytest.raises(UserError, match=r"six\.tif cannot be decoded .* more than 4 channels without"):
        read_image(tmp_path / "six.tif")


def test_the_header_of_a_huge_image_gives_no_warning(tmp_path):
    Image.new("1", (20000, 10000)).save(tmp_path / "huge.png")
    assert header_size(tmp_path / "huge.png") in {(10000, 20000), None}


def _tiff(image: np.ndarray) -> bytes:
    """A little-endian TIFF without compression, channels interleaved."""
    height, width, channels = image.shape
    bits_at, data_at = 8 + 2 + 9 * 12 + 4, 8 + 2 + 9 * 12 + 4 + 2 * channels
    tags = [
        (256, 3, 1, width),
        (257, 3, 1, height),
        (258, 3, channels, bits_at),
        (259, 3, 1, 1),
        (262, 3, 1, 1),
        (273, 4, 1, data_at),
        (277, 3, 1, channels),
        (278, 3, 1, height),
        (279, 4, 1, image.size),
    ]
    head = struct.pack("<2sHIH", b"II", 42, 8, len(tags)) + b"".join(struct.pack("<HHII", *t) for t in tags)
    return head + struct.pack("<I", 0) + struct.pack(f"<{channels}H", *[8] * channels) + image.tobytes()


def grey_png(path, labels, bits):
    """A grey PNG of any depth, written by its specification."""
    planes = [(labels >> bit) & 1 for bit in reversed(range(bits))]
    rows = np.packbits(np.stack(planes, axis=2).reshape(len(labels), -1).astype(np.uint8), axis=1)
    content = b"".join(b"\0" + row.tobytes() for row in rows)  # no filter
    header = struct.pack(">IIBBBBB", labels.shape[1], labels.shape[0], bits, 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(content)), (b"IEND", b""))
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + b"".join(
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
            for kind, data in chunks
        )
    )


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_grey_masks_of_few_bits_give_labels(tmp_path, bits):
    labels = np.random.default_rng(0).integers(0, 2**bits, (9, 13))
    grey_png(tmp_path / "mask.png", labels, bits)
    np.testing.assert_array_equal(read_mask(tmp_path / "mask.png"), labels)


@pytest.mark.parametrize("compression", [None, "group4", "tiff_lzw"])
def test_tiff_masks_of_one_bit_give_labels(tmp_path, compression):
    labels = np.random.default_rng(0).integers(0, 2, (9, 13), np.uint8)
    Image.fromarray(labels.astype(bool)).save(tmp_path / "mask.tif", compression=compression)
    np.testing.assert_array_equal(read_mask(tmp_path / "mask.tif"), labels)
    Image.fromarray(255 * labels).save(tmp_path / "mask.tif")  # of 8 bits: labels 0 and 255
    np.testing.assert_array_equal(read_mask(tmp_path / "mask.tif"), 255 * labels)


def test_masks_with_a_palette_may_be_larger_than_pillow_opens(tmp_path, monkeypatch):
    labels = np.random.default_rng(0).integers(0, 21, (30, 41), dtype=np.uint8)
    image = Image.fromarray(labels)
    image.putpalette([9] * 768)
    image.save(tmp_path / "voc.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    np.testing.assert_array_equal(read_mask(tmp_path / "voc.png"), labels)


def test_masks_with_a_palette_give_indices_not_colours(tmp_path):
    labels = np.random.default_rng(0).integers(0, 21, (30, 41), dtype=np.uint8)
    labels[0] = 255
    image = Image.fromarray(labels)
    image.putpalette(np.random.default_rng(1).integers(0, 256, 768, dtype=np.uint8).tobytes())
    image.save(tmp_path / "voc.png")
    np.testing.assert_array_equal(read_mask(tmp_path / "voc.png"), labels)
    few = Image.fromarray(labels % 4)  # four colours: two bits a pixel
    few.putpalette([0, 0, 0, 9, 9, 9, 50, 50, 50, 90, 90, 90])
    few.save(tmp_path / "few.png", bits=2)
    np.testing.assert_array_equal(read_mask(tmp_path / "few.png"), labels % 4)
    data = (tmp_path / "voc.png").read_bytes()
    (tmp_path / "voc.png").write_bytes(data[: len(data) // 2])
    with pytest.raises(UserError, match=r"voc.png cannot be decoded"):
        read_mask(tmp_path / "voc.png")
