"""UAVid (Lyu et al., arXiv 1810.10438): sequences of 4K images with masks in colours."""

from pathlib import Path

from seg4k.data.formats.base import Listing, in_subfolders, packaged_classes
from seg4k.data.labels import Labelling
from seg4k.errors import UserError

LAYOUT = "uavid_{train,val}/seqN/Images/*.png and uavid_{train,val}/seqN/Labels/*.png"
WINDOWED = False
CHANNELS = 3


def labelling(root: Path) -> Labelling:
    """The 8 classes, each by its colour in the masks."""
    return packaged_classes("uavid")


def splits(root: Path) -> list[str]:
    """Those with a folder."""
    return [split for split in ("train", "val", "test") if _folder(root, split).is_dir()]


def listing(root: Path, split: str) -> Listing:
    """Sequence by sequence; a sample is called seqN/FRAME."""
    folder = _folder(root, split)
    sequences = sorted(path for path in folder.glob("seq*") if path.is_dir())
    if not sequences:
        raise UserError(f"The folder {folder} holds no sequences; a data folder holds {LAYOUT}.")
    return in_subfolders(sequences, LAYOUT, lambda seq: seq / "Images", lambda seq: seq / "Labels")


def _folder(root: Path, split: str) -> Path:
    return next(
        (path for path in (root / f"uavid_{split}", root / split) if path.is_dir()), root / f"uavid_{split}"
    )
