"""GeoTIFF scenes, read window by window through rasterio (extra `geo`)."""

import importlib
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seg4k.data.images import Image, WrongDepthError
from seg4k.data.scenes import Window
from seg4k.errors import UserError

SUFFIXES = (".tif", ".tiff")
INSTALL = "pip install 'seg4k[geo]'"
# What one process lets GDAL keep of decoded blocks.
CACHE_BYTES = 256 * 2**20
_GEO_TAGS = (33550, 33922, 34264, 34735)  # scale, tie points, transformation, keys


@dataclass(frozen=True)
class Raster:
    """What the header of a raster says.

    Attributes:
        size: height and width.
        channels: bands.
        dtype: uint8 or uint16.
        profile: CRS, transform and the rest, as rasterio gives them.
    """

    path: Path
    size: tuple[int, int]
    channels: int
    dtype: np.dtype[Any]
    profile: dict[str, Any]


def is_georeferenced(path: Path | str) -> bool:
    """Whether a file is a TIFF that says where on Earth it lies; needs no rasterio."""
    if Path(path).suffix.lower() not in SUFFIXES:
        return False
    try:
        with Path(path).open("rb") as file:
            head = file.read(16)
            order = {b"II": "<", b"MM": ">"}[head[:2]]
            (version,) = struct.unpack(f"{order}H", head[2:4])
            big = version == 43  # BigTIFF: wider offsets, counts and entries
            (offset,) = (
                struct.unpack(f"{order}Q", head[8:16]) if big else struct.unpack(f"{order}I", head[4:8])
            )
            file.seek(offset)
            (count,) = struct.unpack(f"{order}{'Q' if big else 'H'}", file.read(8 if big else 2))
            entry = 20 if big else 12
            entries = file.read(entry * count)
            tags = {struct.unpack_from(f"{order}H", entries, number * entry)[0] for number in range(count)}
    except (OSError, KeyError, struct.error):
        return False  # whatever is wrong is told by the decoder
    return not tags.isdisjoint(_GEO_TAGS)


def open_raster(path: Path | str) -> Raster:
    """Read the header.

    Raises:
        UserError: where rasterio is missing, or the file is damaged or of another type than 8 or 16 bits.
    """
    rasterio = _rasterio()
    try:
        with _still(), rasterio.open(path) as dataset:
            dtypes = set(dataset.dtypes)
            size, channels = (int(dataset.height), int(dataset.width)), int(dataset.count)
            profile = dict(dataset.profile)
    except rasterio.errors.RasterioIOError as error:
        raise UserError(f"{path} cannot be read ({error}); restore, convert or remove the file.") from None
    if not dtypes <= {"uint8", "uint16"} or len(dtypes) != 1:
        raise WrongDepthError(
            f"{path} holds {', '.join(sorted(dtypes))} values; save all bands with 8 or 16 bits."
        )
    return Raster(Path(path), size, channels, np.dtype(dtypes.pop()), profile)


def read_raster(raster: Raster, window: Window) -> tuple[Image, NDArray[np.bool_]]:
    """Pixels (h, w, C) of a window inside the raster, and where they are data (h, w); nothing else is read.

    Raises:
        UserError: where the blocks that are needed are damaged.
    """
    rasterio = _rasterio()
    place = _place(window)
    try:
        with _still(), rasterio.Env(GDAL_CACHEMAX=CACHE_BYTES), rasterio.open(raster.path) as dataset:
            bands = dataset.read(window=place)
            valid = dataset.dataset_mask(window=place) > 0
    except rasterio.errors.RasterioIOError as error:
        raise UserError(
            f"{raster.path} cannot be read at {tuple(window)} ({error}); restore or remove the file."
        ) from None
    return np.ascontiguousarray(np.moveaxis(bands, 0, 2)), valid


def read_small(raster: Raster, size: tuple[int, int]) -> Image:
    """The whole raster (h, w, C) at a smaller size, from its overviews where it has them."""
    rasterio = _rasterio()
    with _still(), rasterio.Env(GDAL_CACHEMAX=CACHE_BYTES), rasterio.open(raster.path) as dataset:
        bands = dataset.read(out_shape=(raster.channels, *size), resampling=rasterio.enums.Resampling.nearest)
    return np.ascontiguousarray(np.moveaxis(bands, 0, 2))


def _place(window: Window) -> Any:  # noqa: ANN401 - rasterio has no types
    from rasterio.windows import Window as Place

    return Place(window.left, window.top, window.width, window.height)


class RasterWriter:
    """Writes labels in blocks, with the place on Earth, colours and `nodata` of the scene.

    Args:
        path: a GeoTIFF, written anew.
        like: the scene whose CRS and transform are kept.
        colours: (labels, 3) uint8, a colour table for labels of 8 bits.
        nodata: the label of pixels that are none.
        dtype: uint8 or uint16.
    """

    def __init__(
        self, path: Path, like: Raster, colours: NDArray[np.uint8], nodata: int, dtype: np.dtype[Any]
    ) -> None:
        rasterio = _rasterio()
        self._env = rasterio.Env(GDAL_CACHEMAX=CACHE_BYTES)
        self._env.__enter__()
        with _still():
            self._dataset = rasterio.open(
                path,
                "w",
                driver="GTiff",
                height=like.size[0],
                width=like.size[1],
                count=1,
                dtype=dtype.name,
                crs=like.profile.get("crs"),
                transform=like.profile.get("transform"),
                nodata=nodata,
                tiled=True,
                blockxsize=256,
                blockysize=256,
                compress="deflate",
                BIGTIFF="IF_SAFER",
            )
        if dtype == np.uint8:
            self._dataset.write_colormap(1, {i: (*map(int, rgb), 255) for i, rgb in enumerate(colours)})

    def write(self, window: Window, labels: NDArray[Any]) -> None:
        """Write labels (h, w) into a window."""
        self._dataset.write(labels, 1, window=_place(window))

    def close(self) -> None:
        """Finish the file."""
        self._dataset.close()
        self._env.__exit__(None, None, None)


@contextmanager
def _still() -> Iterator[None]:
    """Without the warnings of a TIFF that has no place on Earth, and of affine's old operator in rasterio."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Use `@` matmul", category=PendingDeprecationWarning)
        warnings.filterwarnings("ignore", message="Dataset has no geotransform")
        yield


def _rasterio() -> Any:  # noqa: ANN401 - a module without types
    try:
        return importlib.import_module("rasterio")
    except ImportError:
        raise UserError(f"GeoTIFF scenes need the package rasterio: {INSTALL}") from None
