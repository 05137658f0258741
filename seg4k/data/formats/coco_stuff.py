"""COCO-Stuff (Caesar et al., arXiv 1612.03716): the images of COCO 2017 and its `stuffthingmaps`."""

from pathlib import Path

from seg4k.data.formats.base import Listing, by_name, packaged_classes
from seg4k.data.labels import Labelling

LAYOUT = "{train,val}2017/*.jpg (or in images/) and stuffthingmaps/{train,val}2017/*.png (or in annotations/)"
WINDOWED = False
CHANNELS = 3
_IMAGES = (".", "images")
_MASKS = ("stuffthingmaps", "stuffthingmaps_trainval2017", "annotations")


def labelling(root: Path) -> Labelling:
    """The 171 of 182 official labels that are used; the value in a mask is the official id less one."""
    return packaged_classes("coco_stuff")


def splits(root: Path) -> list[str]:
    """Those with a folder of images."""
    return [split for split in ("train", "val") if _first(root, _IMAGES, split).is_dir()]


def listing(root: Path, split: str) -> Listing:
    """Images and maps of the split; maps of other forms beside them (`*_labelTrainIds.png`) are left out."""
    masks = _first(root, _MASKS, split)
    return Listing(
        by_name(_first(root, _IMAGES, split), LAYOUT, (".jpg", ".jpeg", ".png")),
        by_name(masks, LAYOUT, (".png",), lambda path: None if "_label" in path.stem else path.stem),
        lambda name: masks / f"{name}.png",
    )


def _first(root: Path, folders: tuple[str, ...], split: str) -> Path:
    """The first of the folders that has the split; else where it belongs."""
    paths = [root / folder / f"{split}2017" for folder in folders]
    return next((path for path in paths if path.is_dir()), paths[0])
