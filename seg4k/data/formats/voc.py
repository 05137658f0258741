"""Pascal VOC (Everingham et al., IJCV 2010): lists of images, masks whose palette indices are classes."""

from pathlib import Path

from seg4k.data.formats.base import Listing, by_name, from_list, packaged_classes
from seg4k.data.labels import Labelling

LAYOUT = "JPEGImages/*.jpg, SegmentationClass/*.png and ImageSets/Segmentation/{train,val}.txt"
WINDOWED = False
CHANNELS = 3


def labelling(root: Path) -> Labelling:
    """Background and 20 classes; 255, the borders of objects, is ignored."""
    return packaged_classes("voc")


def splits(root: Path) -> list[str]:
    """Those with a list."""
    return [path.stem for path in sorted((root / "ImageSets" / "Segmentation").glob("*.txt"))]


def listing(root: Path, split: str) -> Listing:
    """The images that ImageSets/Segmentation/SPLIT.txt names."""
    masks = root / "SegmentationClass"
    return from_list(
        root / "ImageSets" / "Segmentation" / f"{split}.txt",
        by_name(root / "JPEGImages", LAYOUT),
        by_name(masks, LAYOUT, (".png",)),
        lambda name: masks / f"{name}.png",
    )
