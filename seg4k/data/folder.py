"""A plain folder: `images/{train,val}`, `masks/{train,val}` and a class file."""

from pathlib import Path

from seg4k.data.classes import ClassTable
from seg4k.data.images import SUFFIXES, header_size
from seg4k.data.scenes import FileScene, PairReader, size_error
from seg4k.errors import UserError

MASK_SUFFIXES = (".png", ".tif", ".tiff")  # JPEG changes labels
CLASS_FILES = ("classes.json", "classes.csv", "classes.txt")

_LAYOUT = "images/train, images/val, masks/train, masks/val and classes.json"


def read_classes(root: Path | str | None) -> ClassTable:
    """The class table of the folder, from the first of `CLASS_FILES` that exists.

    Raises:
        UserError: where the folder or the class file is missing or wrong.
    """
    root = _check_root(root)
    for name in CLASS_FILES:
        if (root / name).exists():
            return ClassTable.from_file(root / name)
    return ClassTable.from_file(root / CLASS_FILES[0])


def scenes(root: Path | str | None, split: str, reader: PairReader) -> list[FileScene]:
    """The pairs of a split in the order of their names; existence, pairing and sizes are checked.

    Sizes come from the files' headers; pixels are not read but where a header cannot be understood.

    Raises:
        UserError: where a folder is missing or empty, an image has no mask, two files have the same stem, or
            a mask has another size than its image.
    """
    root = _check_root(root)
    images = _by_stem(root / "images" / split, SUFFIXES)
    masks = _by_stem(root / "masks" / split, MASK_SUFFIXES)
    missing = [path for stem, path in images.items() if stem not in masks]
    if missing:
        more = f" (and {len(missing) - 1} more images)" if len(missing) > 1 else ""
        raise UserError(
            f"The image {missing[0]}{more} has no mask; add {root / 'masks' / split / missing[0].stem}.png, "
            "or remove the image."
        )
    found: list[FileScene] = []
    for stem, image in images.items():
        mask = masks[stem]
        size, mask_size = header_size(image), header_size(mask)
        if size is None or mask_size is None:
            size = mask_size = reader.read(image, mask)[1].shape  # raises what is wrong, if anything is
        if size != mask_size:
            raise size_error(image, size, mask, mask_size)
        found.append(FileScene(stem, size, image, mask, reader))
    return found


def first_image(root: Path | str | None) -> Path:
    """The first training image; of a folder without training images, the first of another split.

    Raises:
        UserError: where there is none.
    """
    images = _check_root(root) / "images"
    others = sorted(path for path in images.glob("*") if path.is_dir())
    split = images / "train" if (images / "train").is_dir() or not others else others[0]
    return next(iter(_by_stem(split, SUFFIXES).values()))


def _check_root(root: Path | str | None) -> Path:
    if root is None or not str(root):
        raise UserError(f"data=folder needs a folder: set data.root=FOLDER; in it are {_LAYOUT}.")
    path = Path(root)
    if not path.is_dir():
        raise UserError(f"The data folder {path} does not exist; set data.root=FOLDER; in it are {_LAYOUT}.")
    return path


def _by_stem(folder: Path, suffixes: tuple[str, ...]) -> dict[str, Path]:
    if not folder.is_dir():
        raise UserError(f"The folder {folder} does not exist; a data folder holds {_LAYOUT}.")
    paths: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix.lower() not in suffixes or path.name.startswith("."):
            continue
        if path.stem in paths:
            raise UserError(
                f"{paths[path.stem]} and {path} have the same name; remove or rename one of them."
            )
        paths[path.stem] = path
    if not paths:
        raise UserError(f"The folder {folder} holds no {'/'.join(suffixes)} files; put them there.")
    return paths
