import json

import cv2
import numpy as np
import pytest
import torch
from PIL import Image

from seg4k.cli import main
from seg4k.data.classes import ClassTable
from seg4k.data.images import read_image
from seg4k.inference.memory import WholeImages
from seg4k.inference.outputs import write_mask, write_overlay
from seg4k.inference.segmenter import load_segmenter


@pytest.fixture
def images(root, tmp_path):
    folder = tmp_path / "images"
    (folder / "sub").mkdir(parents=True)
    for number, name in enumerate(("a.png", "b.jpg", "sub/c.png")):
        cv2.imwrite(str(folder / name), cv2.imread(str(root / "images" / "val" / f"{number}.png")))
    return folder


def predict(checkpoint, source, output, *overrides):
    return main(["predict", f"checkpoint={checkpoint}", f"input={source}", f"output={output}", *overrides])


def masks(output):
    return {
        str(path.relative_to(output / "masks")): np.array(Image.open(path))
        for path in sorted((output / "masks").rglob("*.png"))
    }


def test_masks_hold_labels_and_show_colours(checkpoint, images, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert predict(checkpoint, images, "out") == 0
    output = tmp_path / "out"
    found = masks(output)
    assert list(found) == ["a.png", "b.png", "sub/c.png"]
    segmenter = load_segmenter(checkpoint, "cpu", "fp32")
    image = torch.from_numpy(read_image(images / "a.png")).permute(2, 0, 1)[None]
    np.testing.assert_array_equal(found["a.png"], segmenter.model(image).argmax(1)[0].numpy())
    assert (found["a.png"][:, :30] == 0).mean() > 0.9
    assert (found["a.png"][:, 42:] == 1).mean() > 0.9
    shown = np.array(Image.open(output / "masks/a.png").convert("RGB"))
    assert {tuple(pixel) for pixel in shown.reshape(-1, 3).tolist()} <= {(200, 30, 30), (30, 30, 200)}
    assert cv2.imread(str(output / "overlays/sub/c.jpg")).shape == (48, 72, 3)
    assert not (output / "probabilities").exists()
    assert json.loads((output / "predict.json").read_text())["failed"] == []
    assert {path.name for path in tmp_path.iterdir()} == {"images", "out"}


def test_it_goes_on_where_it_stopped_and_refuses_other_settings(checkpoint, images, tmp_path, capsys):
    output = tmp_path / "out"
    assert predict(checkpoint, images, output) == 0
    first = {path: path.stat().st_mtime_ns for path in (output / "masks").rglob("*.png")}
    (output / "masks" / "b.png").unlink()
    capsys.readouterr()
    assert predict(checkpoint, images, output) == 0
    assert "2 of 3 images have a mask: done before" in capsys.readouterr().out
    second = {path: path.stat().st_mtime_ns for path in (output / "masks").rglob("*.png")}
    assert [path.name for path in first if first[path] != second[path]] == ["b.png"]
    assert predict(checkpoint, images, output, "flips=[horizontal]") == 2
    assert "holds predictions by another flips; choose another output" in capsys.readouterr().err
    assert predict(checkpoint, images, output, "flips=[horizontal]", "overwrite=true") == 0
    assert "3 predicted" in capsys.readouterr().out


def test_a_damaged_file_is_reported_and_the_rest_done(checkpoint, images, tmp_path, capsys):
    (images / "a.png").write_bytes((images / "a.png").read_bytes()[:300])
    cv2.imwrite(str(images / "grey.png"), np.zeros((20, 20), np.uint8))
    output = tmp_path / "out"
    assert predict(checkpoint, images, output) == 2
    error = capsys.readouterr().err
    assert "2 of 4 images could not be predicted" in error
    assert "a.png cannot be decoded" in error
    assert "grey.png has 1 channels, but the checkpoint takes 3" in error
    assert list(masks(output)) == ["b.png", "sub/c.png"]
    failed = json.loads((output / "predict.json").read_text())["failed"]
    assert [entry["image"] for entry in failed] == [str(images / "a.png"), str(images / "grey.png")]
    # Mended, the same command does what is left.
    (images / "grey.png").unlink()
    cv2.imwrite(str(images / "a.png"), np.zeros((48, 72, 3), np.uint8))
    assert predict(checkpoint, images, output) == 0
    assert list(masks(output)) == ["a.png", "b.png", "sub/c.png"]


def test_windows_agree_with_the_whole_and_probabilities_with_the_masks(checkpoint, images, tmp_path):
    image = np.tile(read_image(images / "a.png"), (2, 1, 1))
    big = tmp_path / "big.png"
    cv2.imwrite(str(big), image[:, :, ::-1])
    assert predict(checkpoint, big, tmp_path / "whole", "window=whole", "probabilities=true") == 0
    windows = ("window=[48,48]", "overlap=0.5", "window_batch=3", "probabilities=true", "overlays=false")
    assert predict(checkpoint, big, tmp_path / "windows", *windows, "block_bytes=200000") == 0
    whole, parts = masks(tmp_path / "whole")["big.png"], masks(tmp_path / "windows")["big.png"]
    assert (whole == parts).mean() > 0.97
    probabilities = np.load(tmp_path / "windows" / "probabilities" / "big.npy")
    assert probabilities.shape == (3, 96, 72)
    assert probabilities.dtype == np.float16
    np.testing.assert_allclose(probabilities.astype(np.float32).sum(0), 1, atol=3e-3)
    assert (probabilities.argmax(0) == parts).mean() > 0.995
    assert not (tmp_path / "windows" / "overlays").exists()
    options = ("flips=[horizontal,vertical]", "scales=[0.75,1.0]", "window=whole")
    assert predict(checkpoint, big, tmp_path / "tta", *options) == 0
    assert (masks(tmp_path / "tta")["big.png"] == whole).mean() > 0.6


def test_same_stems_keep_their_suffix(checkpoint, images, tmp_path):
    cv2.imwrite(str(images / "a.jpg"), np.zeros((20, 30, 3), np.uint8))
    assert predict(checkpoint, images, tmp_path / "out") == 0
    assert set(masks(tmp_path / "out")) == {"a.jpg.png", "a.png.png", "b.png", "sub/c.png"}


def test_memory_decides_between_whole_and_windows(checkpoint, monkeypatch):
    whole = WholeImages(load_segmenter(checkpoint, "cpu", "fp32"))
    monkeypatch.setattr("seg4k.inference.memory.free_bytes", lambda device: 10**9)
    assert whole.fit(100, 100, scores=False)
    assert not whole.fit(20_000, 20_000, scores=False)
    # Four images of decoder features or so: bytes, not kilobytes, for each pixel.
    assert 50 < whole._bytes_per_pixel < 2000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "set input=FOLDER or input=FILE"),
        (["input=/none"], "set input=FOLDER"),
        (["input=/none", "output=o"], "/none: no such file or folder"),
        (["input={images}", "output=o"], "checkpoint must be set"),
        (["input={images}", "output=o", "window=half"], "window=half: give auto, whole, or [height, width]"),
        (["input={images}", "output=o", "window=[0,5]"], "window=[0, 5]"),
        (["input={images}", "output=o", "overlap=1"], "overlap=1: give a number from 0 to 0.9"),
        (["input={images}", "output=o", "flips=[diagonal]"], "give a list of horizontal and vertical"),
        (["input={images}", "output=o", "scales=[]"], "scales=[]: give a list of numbers"),
        (["input={images}", "output=o", "window_batch=0"], "window_batch=0"),
        (["input={images}", "output=o", "overlays=maybe"], "overlays=maybe: give true or false"),
    ],
)
def test_mistakes_end_with_one_message(images, capsys, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(["predict", *(word.format(images=images) for word in arguments)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_labels_beyond_a_byte_and_overlays_of_16_bits(tmp_path):
    many = ClassTable.from_names([str(i) for i in range(300)], ignore_index=65535)
    labels = np.arange(300, dtype=np.uint16).reshape(15, 20)
    labels[0, 0] = 65535
    write_mask(tmp_path / "m.png", labels, many)
    np.testing.assert_array_equal(cv2.imread(str(tmp_path / "m.png"), cv2.IMREAD_UNCHANGED), labels)
    image = np.full((15, 20, 1), 40000, np.uint16)
    write_overlay(tmp_path / "o.jpg", image, labels, many)
    overlay = cv2.imread(str(tmp_path / "o.jpg"))
    assert overlay.shape == (15, 20, 3)
