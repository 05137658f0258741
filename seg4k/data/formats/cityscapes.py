"""Cityscapes (Cordts et al., arXiv 1604.01685), as its archives unpack."""

from pathlib import Path

from seg4k.data.formats.base import Listing, in_subfolders, packaged_classes
from seg4k.data.labels import Labelling
from seg4k.errors import UserError

LAYOUT = "leftImg8bit/{train,val}/CITY/*_leftImg8bit.png and gtFine/{train,val}/CITY/*_gtFine_labelIds.png"
WINDOWED = False
CHANNELS = 3
_IMAGE, _MASK = "_leftImg8bit", "_gtFine_labelIds"


def labelling(root: Path) -> Labelling:
    """The 19 classes of the benchmark by their label ids; the other ids are ignored."""
    return packaged_classes("cityscapes")


def splits(root: Path) -> list[str]:
    """The folders of leftImg8bit."""
    return [path.name for path in sorted((root / "leftImg8bit").glob("*")) if path.is_dir()]


def listing(root: Path, split: str) -> Listing:
    """City by city; a sample is called CITY/CITY_SEQUENCE_FRAME."""
    cities = sorted(path for path in (root / "leftImg8bit" / split).glob("*") if path.is_dir())
    if not cities:
        raise UserError(
            f"The folder {root / 'leftImg8bit' / split} holds no cities; a data folder holds {LAYOUT}."
        )
    return in_subfolders(
        cities,
        LAYOUT,
        lambda city: city,
        lambda city: root / "gtFine" / split / city.name,
        image_name=lambda path: _without(path, _IMAGE),
        # Colours, instances and polygons lie beside the label ids.
        mask_name=lambda path: _without(path, _MASK),
        mask_file=f"{{}}{_MASK}.png",
    )


def _without(path: Path, ending: str) -> str | None:
    return path.stem.removesuffix(ending) if path.stem.endswith(ending) else None
