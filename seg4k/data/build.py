"""From the plain values of the config group `data` to a datamodule."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seg4k.errors import UserError

if TYPE_CHECKING:
    from seg4k.data.datamodule import SegmentationDataModule, Source
    from seg4k.data.formats.base import Format
    from seg4k.data.scenes import PairReader


def build_datamodule(
    config: Mapping[str, Any], *, seed: int, batch_size: int, accumulate: int = 1
) -> "SegmentationDataModule":
    """Check the config group `data` (keys as in conf/data/*.yaml) and make its datamodule.

    The class file of a folder is read at once; images are looked at in `setup`.

    Args:
        config: plain values; `name` and `image_size` must be there.
        seed: seed of the run.
        batch_size: samples per step on one process.
        accumulate: steps of one optimizer step; an epoch is cut to a whole number of optimizer steps.

    Raises:
        UserError: for an unknown key, a value out of its range, or a class file that is missing or wrong.
    """
    from seg4k.data.datamodule import SegmentationDataModule
    from seg4k.data.settings import read_settings

    settings = read_settings(config)
    if batch_size < 1 or accumulate < 1:
        raise UserError(f"The batch size is {batch_size} with {accumulate} steps; both are 1 or more.")
    source = _source(config)
    for class_name in settings.rare_classes:
        source.class_table.index(class_name)
    return SegmentationDataModule(source, settings, seed=seed, batch_size=batch_size, accumulate=accumulate)


def build_reader(config: Mapping[str, Any]) -> "tuple[Format, Path, PairReader]":
    """The format that the config group `data` names, its folder, and what reads its pairs; no image is read.

    The reader's channels are 0 where the first image is to tell them.

    Raises:
        UserError: where the folder or the classes are missing or wrong.
    """
    from seg4k.data import blue_marble
    from seg4k.data.formats.base import check_root, load_format
    from seg4k.data.labels import Labelling
    from seg4k.data.scenes import PairReader
    from seg4k.data.settings import path_or_none, whole_number

    name, root = config["name"], path_or_none("root", config.get("root"))
    if name == "blue_marble":  # once built, a plain folder
        name, root = "folder", blue_marble.prepare(root or Path("data/blue_marble"))
    form = load_format(name)
    found = check_root(name, root, form.LAYOUT)
    class_file = path_or_none("class_file", config.get("class_file"))
    labelling = Labelling.from_file(class_file) if class_file else form.labelling(found)
    channels = whole_number("in_channels", config.get("in_channels"), least=1) or form.CHANNELS
    return form, found, PairReader(labelling, channels or 0, grey=channels == 3)


def _source(config: Mapping[str, Any]) -> "Source":
    from seg4k.data.cache import ArrayCache, open_cache
    from seg4k.data.datamodule import BlueMarbleSource, FormatSource
    from seg4k.data.settings import path_or_none, whole_number

    name, root = config["name"], path_or_none("root", config.get("root"))
    if name == "blue_marble":
        return BlueMarbleSource(root or Path("data/blue_marble"))
    kind, folder = config.get("cache", "none"), path_or_none("cache_dir", config.get("cache_dir"))
    most_bytes = whole_number("cache_bytes", config.get("cache_bytes", 2**33), least=1) or 2**33

    def cache(root: Path) -> ArrayCache | None:
        return open_cache(kind, most_bytes, folder, root)

    return FormatSource(
        name,
        root,
        whole_number("in_channels", config.get("in_channels"), least=1),
        path_or_none("class_file", config.get("class_file")),
        cache,
        skip_unreadable=config.get("on_error") == "skip",
    )
