import json
import shutil

import cv2
import numpy as np
import pytest
import torch
from PIL import Image

from seg4k.cli import main
from seg4k.data.classes import ClassTable
from seg4k.data.images import read_image
from seg4k.inference import predict as predict_module
from seg4k.inference.memory import WholeImages, _free_of_the_container
from seg4k.inference.one_image import Options, Predictor
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


def test_other_weights_under_the_same_name_are_another_checkpoint(checkpoint, images, tmp_path, capsys):
    """Two trainings of one configuration write files of the same size."""
    here, output = tmp_path / "best.ckpt", tmp_path / "out"
    content = torch.load(checkpoint, weights_only=False)
    torch.save(content, here)
    shutil.copy(here, tmp_path / "moved.ckpt")
    assert predict(here, images, output) == 0
    for tensor in content["state_dict"].values():
        tensor.mul_(2)
    size = here.stat().st_size
    torch.save(content, here)
    assert here.stat().st_size == size
    assert predict(here, images, output) == 2
    assert "holds predictions by another checkpoint" in capsys.readouterr().err
    # The same content in another place is the same checkpoint.
    assert predict(tmp_path / "moved.ckpt", images, output) == 0


def test_what_overwrite_was_stopped_in_is_not_taken_for_done(checkpoint, images, tmp_path, monkeypatch):
    output = tmp_path / "out"
    assert predict(checkpoint, images, output) == 0
    real = predict_module._predict_one
    done = []

    def stopped(predictor, job):
        if done:
            raise KeyboardInterrupt
        done.append(job.image)
        real(predictor, job)

    options = ("window=[16,16]", "overlap=0.0", "scales=[0.5]")
    with monkeypatch.context() as patched:
        patched.setattr(predict_module, "_predict_one", stopped)
        assert predict(checkpoint, images, output, *options, "overwrite=true") == 130
    assert predict(checkpoint, images, output, *options) == 0
    assert predict(checkpoint, images, tmp_path / "fresh", *options) == 0
    fresh = masks(tmp_path / "fresh")
    assert {name: mask.tolist() for name, mask in masks(output).items()} == {
        name: mask.tolist() for name, mask in fresh.items()
    }


def test_images_may_lie_below_the_output(checkpoint, images, capsys):
    assert predict(checkpoint, images, images) == 0
    assert predict(checkpoint, images, images, "overwrite=true") == 0
    assert "3 predicted" in capsys.readouterr().out
    assert list(masks(images)) == ["a.png", "b.png", "sub/c.png"]
    assert predict(checkpoint, images / "masks", images) == 2
    assert "only what was written to output=" in capsys.readouterr().err


def test_a_damaged_file_is_reported_and_the_rest_done(checkpoint, images, tmp_path, capsys):
    (images / "a.png").write_bytes((images / "a.png").read_bytes()[:300])
    cv2.imwrite(str(images / "clear.png"), np.zeros((20, 20, 4), np.uint8))
    output = tmp_path / "out"
    assert predict(checkpoint, images, output) == 2
    error = capsys.readouterr().err
    assert "2 of 4 images could not be predicted" in error
    assert "a.png cannot be decoded" in error
    assert "clear.png has 4 channels, but the checkpoint takes 3" in error
    assert list(masks(output)) == ["b.png", "sub/c.png"]
    failed = json.loads((output / "predict.json").read_text())["failed"]
    assert [entry["image"] for entry in failed] == [str(images / "a.png"), str(images / "clear.png")]
    # Mended, the same command does what is left.
    (images / "clear.png").unlink()
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


def test_a_grey_photograph_is_seen_as_three_equal_channels(checkpoint, images, tmp_path):
    grey = cv2.imread(str(images / "a.png"), cv2.IMREAD_GRAYSCALE)
    folder = tmp_path / "both"
    folder.mkdir()
    cv2.imwrite(str(folder / "one.png"), grey)
    cv2.imwrite(str(folder / "three.png"), np.stack([grey] * 3, 2))
    assert predict(checkpoint, folder, tmp_path / "out") == 0
    found = masks(tmp_path / "out")
    np.testing.assert_array_equal(found["one.png"], found["three.png"])


def test_same_stems_keep_their_suffix(checkpoint, images, tmp_path):
    cv2.imwrite(str(images / "a.jpg"), np.zeros((20, 30, 3), np.uint8))
    assert predict(checkpoint, images, tmp_path / "out") == 0
    assert set(masks(tmp_path / "out")) == {"a.jpg.png", "a.png.png", "b.png", "sub/c.png"}


def test_memory_decides_between_whole_and_windows(checkpoint, monkeypatch):
    whole = WholeImages(load_segmenter(checkpoint, "cpu", "fp32"))
    monkeypatch.setattr("seg4k.inference.memory.free_bytes", lambda device: 10**9)
    assert whole.fit(100, 100, scores=False)
    assert not whole.fit(20_000, 20_000, scores=False)
    # Scaled up, an image is what it is scaled to.
    small = round((0.8e9 / whole._bytes_per_pixel) ** 0.5) - 10
    for scales, expected in (((0.5, 1.0), None), ((1.0, 2.0), (32, 48))):
        predictor = Predictor(whole._segmenter, Options(scales=scales, flips=()))
        predictor._whole = whole
        monkeypatch.setattr(Options, "plain", property(lambda self: True))
        assert predictor.window((small, small)) == expected, scales
    # Four images of decoder features or so: bytes, not kilobytes, for each pixel.
    assert 50 < whole._bytes_per_pixel < 2000


def test_where_memory_runs_out_windows_are_tried_and_the_rest_done(
    checkpoint, images, tmp_path, capsys, monkeypatch
):
    real, asked = Predictor.labels, []

    def short(self, pixels):
        asked.append(pixels.shape)
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 1 bytes")

    monkeypatch.setattr(Predictor, "labels", short)
    assert predict(checkpoint, images, tmp_path / "auto") == 0
    assert len(asked) == 1  # the next images are not tried whole
    assert len(masks(tmp_path / "auto")) == 3
    assert predict(checkpoint, images, tmp_path / "whole", "window=whole") == 2
    assert "3 of 3 images could not be predicted" in (error := capsys.readouterr().err)
    assert "memory ran out; set smaller windows, such as window=[512,512]" in error
    monkeypatch.setattr(Predictor, "labels", real)
    assert predict(checkpoint, images, tmp_path / "whole", "window=whole") == 0


def test_blocks_of_large_windows_keep_to_the_bound(checkpoint, capsys):
    segmenter = load_segmenter(checkpoint, "cpu", "fp32")
    segmenter.config["data"]["image_size"] = [2160, 3840]
    bytes_per_pixel = 4 * (2 * 3 + 2) + 8 * 3
    size = (20_000, 20_000)
    for block_bytes, window in ((2**30, (2160, 3840)), (2**28, (1088, 1920)), (2**20, (48, 64))):
        predictor = Predictor(segmenter, Options(block_bytes=block_bytes))
        predictor.give_up_wholes()
        assert predictor.window(size) == window
        largest = max(block.read.height * block.read.width for block in predictor.blocks(size, window))
        assert largest * bytes_per_pixel <= 2 * block_bytes
    said = capsys.readouterr().err
    assert "windows of 1088x1920; those of the training size, 2160x3840, would take 1.7 GiB" in said
    predictor = Predictor(segmenter, Options(window=(2160, 3840), block_bytes=2**28))
    predictor.blocks(size, predictor.window(size))
    assert "a block of four windows takes 1.7 GiB, more than block_bytes=" in capsys.readouterr().err


def test_the_limit_of_a_container_counts(tmp_path):
    assert _free_of_the_container(tmp_path) == []
    for name, text in (("max", "max"), ("current", "700"), ("stat", "anon 500\ninactive_file 150\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert _free_of_the_container(tmp_path) == []
    (tmp_path / "memory.max").write_text("1000\n")
    assert _free_of_the_container(tmp_path) == [450]
    (tmp_path / "memory").mkdir()
    for name, text in (("limit_in_bytes", "900"), ("usage_in_bytes", "100"), ("stat", "cache 5\n")):
        (tmp_path / "memory" / f"memory.{name}").write_text(text)
    assert _free_of_the_container(tmp_path) == [450, 800]


def test_a_model_trained_in_fp64_is_used_in_fp32(checkpoint, images, tmp_path):
    content = torch.load(checkpoint, weights_only=False)
    content["seg4k"]["config"]["precision"] = "fp64"
    torch.save(content, tmp_path / "fp64.ckpt")
    assert predict(tmp_path / "fp64.ckpt", images, tmp_path / "out") == 0
    assert json.loads((tmp_path / "out" / "predict.json").read_text())["precision"] == "fp32"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "set input=FOLDER or input=FILE"),
        (["input=/none"], "set input=FOLDER"),
        (["input=/none", "output=o"], "/none: no such file or folder"),
        (["input={images}", "output=o"], "checkpoint must be set"),
        (["input={images}", "output=2024"], "output is 2024; give a path"),
        (["input=2024", "output=o"], "input is 2024; give a path"),
        (["input={images}", "output=o", "checkpoint=1"], "checkpoint is 1; give a path"),
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
