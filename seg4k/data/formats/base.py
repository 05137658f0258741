"""What a format has to say, and what all formats share: finding files, pairing them, checking sizes."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, cast

from seg4k.data.images import SUFFIXES, header_size
from seg4k.data.labels import Labelling
from seg4k.data.raster_scenes import RasterScene
from seg4k.data.rasters import open_raster
from seg4k.data.scenes import FileScene, PairReader, Scene, size_error
from seg4k.data.unreadable import name_once
from seg4k.errors import UserError

MASK_SUFFIXES = (".png", ".tif", ".tiff")  # JPEG changes labels
_HEADER_THREADS = 8


@dataclass(frozen=True)
class Listing:
    """The files of a split, not yet paired.

    Attributes:
        images: name of a sample -> its image, in the order of the names.
        masks: name of a sample -> its mask.
        mask_of: where the mask of a sample belongs.
        faults: what is wrong with the layout itself: where, and the message.
    """

    images: Mapping[str, Path]
    masks: Mapping[str, Path]
    mask_of: Callable[[str], Path]
    faults: Sequence[tuple[Path, str]] = field(default=())

    def missing(self) -> dict[str, str]:
        """Samples whose image has no mask, each with the message."""
        return {
            name: f"The image {path} has no mask; add {self.mask_of(name)}, or remove the image."
            for name, path in self.images.items()
            if name not in self.masks
        }

    def extra(self) -> dict[str, str]:
        """Samples whose mask has no image, each with the message."""
        return {
            name: f"The mask {path} has no image; add the image, or remove the mask."
            for name, path in self.masks.items()
            if name not in self.images
        }


class Format(Protocol):
    """A module of this package.

    Attributes:
        LAYOUT: the files that make up a data set, in words.
        WINDOWED: whether files are read by windows instead of as a whole.
        CHANNELS: of the images; 3 of public photographs, of which a few are grey. None: the first one tells.
    """

    LAYOUT: str
    WINDOWED: bool
    CHANNELS: int | None

    def labelling(self, root: Path) -> Labelling:
        """The classes and what masks say of them."""

    def splits(self, root: Path) -> list[str]:
        """The splits that are there, `train` and `val` by these names."""

    def listing(self, root: Path, split: str) -> Listing:
        """The files of a split; pixels are not read."""


def load_format(name: str) -> Format:
    """The module of a format, one of `NAMES`."""
    return cast(Format, importlib.import_module(f"seg4k.data.formats.{name}"))


def packaged_classes(name: str) -> Labelling:
    """The class file of a public data set, in the folder `classes` beside this module."""
    return Labelling.from_file(Path(__file__).parent / "classes" / f"{name}.json")


def check_root(name: str, root: Path | str | None, layout: str) -> Path:
    """The folder of a data set.

    Raises:
        UserError: where it is not set or not there.
    """
    if root is None or not str(root):
        raise UserError(f"data={name} needs a folder: set data.root=FOLDER; in it are {layout}.")
    path = Path(root)
    if not path.is_dir():
        raise UserError(f"The data folder {path} does not exist; set data.root=FOLDER; in it are {layout}.")
    return path


def by_name(
    folder: Path,
    layout: str,
    suffixes: Sequence[str] = SUFFIXES,
    name: Callable[[Path], str | None] = lambda path: path.stem,
    may_be_empty: bool = False,
) -> dict[str, Path]:
    """Files of a folder by the names of their samples, in the order of the file names.

    Args:
        folder: which.
        layout: what a data set holds, for the message.
        suffixes: of files that are taken.
        name: the sample of a file; None for files that are something else.
        may_be_empty: whether a folder without such files is no mistake.

    Raises:
        UserError: where the folder is missing or holds no such file, or two files have the same name.
    """
    if not folder.is_dir():
        raise UserError(f"The folder {folder} does not exist; a data folder holds {layout}.")
    paths: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix.lower() not in suffixes or path.name.startswith("."):
            continue
        sample = name(path)
        if sample is None:
            continue
        if sample in paths:
            raise UserError(f"{paths[sample]} and {path} have the same name; remove or rename one of them.")
        paths[sample] = path
    if not paths and not may_be_empty:
        raise UserError(f"The folder {folder} holds no {'/'.join(suffixes)} files; put them there.")
    return paths


def in_subfolders(
    folders: Sequence[Path],
    layout: str,
    images: Callable[[Path], Path],
    masks: Callable[[Path], Path],
    *,
    image_name: Callable[[Path], str | None] = lambda path: path.stem,
    mask_name: Callable[[Path], str | None] = lambda path: path.stem,
    mask_file: str = "{}.png",
) -> Listing:
    """The files of a split whose images and masks lie in a folder for each scene.

    Names of samples begin with the name of their scene.

    Args:
        folders: the scenes.
        layout: what a data set holds, for the message.
        images: where the images of a scene lie.
        masks: where its masks lie.
        image_name: the sample of an image; None for files that are something else.
        mask_name: likewise of a mask.
        mask_file: name of the mask of a sample.

    Raises:
        UserError: where a scene has no folder of images, or none of them has an image.
    """
    found_images: dict[str, Path] = {}
    found_masks: dict[str, Path] = {}
    where: dict[str, Path] = {}
    for folder in folders:
        # One scene without images or masks is a matter of its files, not of the layout.
        for name, path in by_name(images(folder), layout, SUFFIXES, image_name, may_be_empty=True).items():
            found_images[f"{folder.name}/{name}"] = path
            where[f"{folder.name}/{name}"] = masks(folder) / mask_file.format(name)
        if masks(folder).is_dir():
            pairs = by_name(masks(folder), layout, MASK_SUFFIXES, mask_name, may_be_empty=True)
            found_masks |= {f"{folder.name}/{name}": path for name, path in pairs.items()}
    if not found_images:
        raise UserError(f"The folder {folders[0].parent} holds no images; a data folder holds {layout}.")
    return Listing(found_images, found_masks, where.__getitem__)


def from_list(
    list_file: Path, images: Mapping[str, Path], masks: Mapping[str, Path], mask_of: Callable[[str], Path]
) -> Listing:
    """The samples that a list file names, one a line, with or without suffix; other masks are left out.

    Raises:
        UserError: where the list is missing, unreadable or empty.
    """
    try:
        lines = list_file.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise UserError(
            f"The list {list_file} cannot be read ({error.strerror}); write the name of one image a line."
        ) from None
    except UnicodeDecodeError:
        raise UserError(f"The list {list_file} is not UTF-8 text; write it as such.") from None
    chosen: dict[str, Path] = {}
    faults: list[tuple[Path, str]] = []
    for number, line in enumerate(lines, start=1):
        name = line.strip()
        if not name or name.startswith("#"):
            continue
        if name not in images and name.lower().endswith(SUFFIXES):
            name = name[: name.rindex(".")]
        if name not in images:
            message = (
                f"{list_file}, line {number}: there is no image {name}; correct the line, or add the image."
            )
            faults.append((list_file, message))
        elif name in chosen:
            faults.append((list_file, f"{list_file}, line {number}: {name} stands there twice; remove one."))
        else:
            chosen[name] = images[name]
    if not chosen and not faults:
        raise UserError(f"The list {list_file} is empty; write the name of one image a line.")
    return Listing(chosen, {name: masks[name] for name in chosen if name in masks}, mask_of, faults)


def scenes(
    form: Format, root: Path, split: str, reader: PairReader, *, skip_unreadable: bool = False
) -> list[Scene]:
    """The pairs of a split; existence, pairing and sizes are checked.

    Sizes come from the files' headers; pixels are not read but where a header cannot be understood. With
    `skip_unreadable`, pairs that cannot be read, or do not fit each other, are named and left out.

    Raises:
        UserError: where a folder is missing or empty, an image has no mask, two files have the same name, or
            a mask has another size than its image.
    """
    listing = form.listing(root, split)
    for _, message in listing.faults:
        raise UserError(message)
    missing = list(listing.missing().values())
    if missing:
        more = f" (and {len(missing) - 1} more images)" if len(missing) > 1 else ""
        raise UserError(missing[0].replace(" has no mask", f"{more} has no mask", 1))
    pairs = [(name, image, listing.masks[name]) for name, image in listing.images.items()]
    make = _raster_scene if form.WINDOWED else _file_scene

    def scene(pair: tuple[str, Path, Path]) -> Scene | None:
        try:
            return make(*pair, reader)
        except UserError as error:
            if not skip_unreadable:
                raise
            name_once(error)
            return None

    if form.WINDOWED:
        found = [scene(pair) for pair in pairs]
    else:
        with ThreadPoolExecutor(_HEADER_THREADS) as threads:  # on a shared disk each header is a wait
            found = list(threads.map(scene, pairs))
    kept = [one for one in found if one is not None]
    if not kept:
        raise UserError(f"None of the {len(pairs)} pairs of the split {split} in {root} can be read.")
    return kept


def _file_scene(name: str, image: Path, mask: Path, reader: PairReader) -> Scene:
    size, mask_size = header_size(image), header_size(mask)
    if size is None or mask_size is None:
        size = mask_size = reader.read(image, mask)[1].shape  # raises what is wrong, if anything is
    if size != mask_size:
        raise size_error(image, size, mask, mask_size)
    return FileScene(name, size, image, mask, reader)


def _raster_scene(name: str, image: Path, mask: Path, reader: PairReader) -> Scene:
    return RasterScene(name, open_raster(image), open_raster(mask), reader)
