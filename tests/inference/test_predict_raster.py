import resource
import subprocess
import sys
import time

import numpy as np
import pytest
import rasterio
from affine import Affine
from rasterio.crs import CRS

from seg4k.data.images import read_image
from seg4k.data.rasters import is_georeferenced
from seg4k.training.train import train
from tests.helpers import smoke
from tests.inference.test_predict import predict

# rasterio multiplies transforms in a way that newer versions of affine warn of.
pytestmark = pytest.mark.filterwarnings("ignore:Use `@` matmul:PendingDeprecationWarning")

TRANSFORM = Affine(0.5, 0, 500_000, 0, -0.5, 5_300_000)


@pytest.fixture
def scene(root, tmp_path):
    """A georeferenced scene of the task with a strip of nodata."""
    pixels = np.tile(np.maximum(read_image(root / "images" / "val" / "0.png"), 1), (4, 3, 1))
    pixels[:, -20:] = 0
    path = tmp_path / "scene.tif"
    options = {"width": pixels.shape[1], "height": pixels.shape[0], "count": 3, "dtype": "uint8"}
    place = {"crs": CRS.from_epsg(32632), "transform": TRANSFORM, "nodata": 0}
    with rasterio.open(
        path, "w", driver="GTiff", tiled=True, blockxsize=64, blockysize=64, **options, **place
    ) as file:
        file.write(np.moveaxis(pixels, 2, 0))
    return path


def test_a_scene_keeps_its_place_and_blocks_do_not_show(checkpoint, scene, tmp_path):
    assert is_georeferenced(scene)
    windows = ("window=[48,72]", "window_batch=4")
    assert predict(checkpoint, scene, tmp_path / "once", *windows, "probabilities=true") == 0
    assert predict(checkpoint, scene, tmp_path / "blocks", *windows, "block_bytes=600000") == 0
    with rasterio.open(tmp_path / "once" / "masks" / "scene.tif") as file:
        once = file.read(1)
        assert file.crs == CRS.from_epsg(32632)
        assert file.transform == TRANSFORM
        assert file.nodata == 255
        assert file.colormap(1)[0][:3] == (200, 30, 30)
    with rasterio.open(tmp_path / "blocks" / "masks" / "scene.tif") as file:
        np.testing.assert_array_equal(file.read(1), once)
    assert once.shape == (192, 216)
    assert (once[:, -20:] == 255).all()
    assert (once[:, :-20] < 3).all()
    assert np.load(tmp_path / "once" / "probabilities" / "scene.npy").shape == (3, 192, 216)
    assert read_image(tmp_path / "once" / "overlays" / "scene.jpg").shape == (192, 216, 3)


def test_a_damaged_scene_is_reported(checkpoint, scene, tmp_path, capsys):
    data = scene.read_bytes()
    scene.write_bytes(data[: len(data) // 2])
    assert predict(checkpoint, scene, tmp_path / "out", "window=[48,72]") == 2
    assert "scene.tif cannot be read" in capsys.readouterr().err
    assert not list((tmp_path / "out").rglob("*.tif"))


def test_a_plain_tiff_is_an_image(root, tmp_path):
    import cv2

    cv2.imwrite(str(tmp_path / "plain.tif"), np.zeros((8, 8, 3), np.uint8))
    assert not is_georeferenced(tmp_path / "plain.tif")
    assert not is_georeferenced(root / "images" / "val" / "0.png")
    (tmp_path / "broken.tif").write_bytes(b"II")
    assert not is_georeferenced(tmp_path / "broken.tif")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_scene_of_20000_pixels_a_side_in_under_4_gib(root, tmp_path):
    """Run in a process of its own, whose largest resident set is read at its end; the model is tiny."""
    tiny = ("model.decoder.channels=[4,4,4,4]", "model.head.stride=4", "trainer.max_steps=1")
    train(smoke(root, *tiny, "trainer.val_every_steps=1"), tmp_path / "run", "")
    checkpoint = tmp_path / "run" / "checkpoints" / "last.ckpt"
    path, row = tmp_path / "large.tif", np.random.default_rng(0).integers(1, 255, (3, 500, 20_000), np.uint8)
    options = {"width": 20_000, "height": 20_000, "count": 3, "dtype": "uint8"}
    place = {"crs": CRS.from_epsg(32632), "transform": TRANSFORM, "tiled": True}
    with rasterio.open(path, "w", driver="GTiff", **options, **place) as file:
        for top in range(0, 20_000, 500):
            file.write(row, window=rasterio.windows.Window(0, top, 20_000, 500))
    arguments = [f"checkpoint={checkpoint}", f"input={path}", f"output={tmp_path / 'out'}"]
    arguments += ["window=[1024,1024]", "overlap=0.1", "overlays=false"]
    started = time.monotonic()
    subprocess.run([sys.executable, "-m", "seg4k", "predict", *arguments], check=True)
    print(f"{time.monotonic() - started:.0f} s")
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    print(f"largest resident set {peak / 2**30:.2f} GiB")
    assert peak < 4 * 2**30
    with rasterio.open(tmp_path / "out" / "masks" / "large.tif") as file:
        assert file.shape == (20_000, 20_000)
        assert file.transform == TRANSFORM
