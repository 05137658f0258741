"""ADE20K, the scene parsing benchmark ADEChallengeData2016 (Zhou et al., CVPR 2017)."""

from pathlib import Path

from seg4k.data.formats.base import Listing, by_name, packaged_classes
from seg4k.data.labels import Labelling

LAYOUT = "images/{training,validation}/*.jpg and annotations/{training,validation}/*.png"
WINDOWED = False
CHANNELS = 3
_FOLDERS = {"train": "training", "val": "validation"}


def labelling(root: Path) -> Labelling:
    """The 150 classes, values 1 to 150 of the masks; 0 is ignored."""
    return packaged_classes("ade20k")


def splits(root: Path) -> list[str]:
    """Those with a folder of images."""
    return [split for split, folder in _FOLDERS.items() if (root / "images" / folder).is_dir()]


def listing(root: Path, split: str) -> Listing:
    """images/ and annotations/ of the split."""
    folder = _FOLDERS.get(split, split)
    return Listing(
        by_name(root / "images" / folder, LAYOUT),
        by_name(root / "annotations" / folder, LAYOUT, (".png",)),
        lambda name: root / "annotations" / folder / f"{name}.png",
    )
