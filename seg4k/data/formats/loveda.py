"""LoveDA (Wang et al., arXiv 2110.08733): urban and rural land cover."""

from pathlib import Path

from seg4k.data.formats.base import Listing, in_subfolders, packaged_classes
from seg4k.data.labels import Labelling
from seg4k.errors import UserError

LAYOUT = "{Train,Val}/{Urban,Rural}/images_png/*.png and {Train,Val}/{Urban,Rural}/masks_png/*.png"
WINDOWED = False
CHANNELS = 3
_SCENES = ("Rural", "Urban")


def labelling(root: Path) -> Labelling:
    """The 7 classes, values 1 to 7 of the masks; 0, no data, is ignored."""
    return packaged_classes("loveda")


def splits(root: Path) -> list[str]:
    """Those with a folder."""
    return [split for split in ("train", "val", "test") if (root / split.capitalize()).is_dir()]


def listing(root: Path, split: str) -> Listing:
    """Both domains, or the one that is there; a sample is called Urban/NUMBER."""
    folder = root / split.capitalize()
    domains = [folder / scene for scene in _SCENES if (folder / scene).is_dir()]
    if not domains:
        raise UserError(f"The folder {folder} holds neither Urban nor Rural; a data folder holds {LAYOUT}.")
    return in_subfolders(
        domains, LAYOUT, lambda domain: domain / "images_png", lambda domain: domain / "masks_png"
    )
