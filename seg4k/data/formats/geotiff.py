"""GeoTIFF scenes of any size, laid out as a plain folder, read window by window (extra `geo`)."""

from pathlib import Path

from seg4k.data.formats import folder
from seg4k.data.formats.base import Listing
from seg4k.data.rasters import SUFFIXES

LAYOUT = (
    "images/train, images/val, masks/train and masks/val with .tif files of the same names, and classes.json"
)
WINDOWED = True
CHANNELS = None

labelling = folder.labelling
splits = folder.splits


def listing(root: Path, split: str) -> Listing:
    """As of a plain folder, TIFF files alone."""
    return folder.listing(root, split, SUFFIXES)
