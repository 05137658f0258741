"""The LightningDataModule: one source, its training crops and its validation tiles."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from lightning.pytorch import LightningDataModule

from seg4k.data import blue_marble
from seg4k.data.cache import ArrayCache
from seg4k.data.classes import ClassTable
from seg4k.data.formats.base import check_root, load_format, scenes
from seg4k.data.images import read_image
from seg4k.data.labels import Labelling
from seg4k.data.loader import BatchLoader, ResumableLoader
from seg4k.data.rasters import open_raster
from seg4k.data.samples import CropDataset, Sample, TileDataset, find_rare
from seg4k.data.sampling import EpochSampler, EverySampleSampler
from seg4k.data.scenes import PairReader, Scene, Window
from seg4k.data.settings import Settings
from seg4k.data.unreadable import first_readable
from seg4k.errors import UserError

_MOST_WORKERS = 8
_PICTURE_CANDIDATES = 32


class Source(Protocol):
    """Where scenes come from.

    Attributes:
        class_table: the classes of its masks.
        in_channels: channels of its images.
    """

    class_table: ClassTable
    in_channels: int

    def prepare(self) -> None:
        """Write what is needed on disk; called in one process of each machine, and cheap when it is there."""

    def scenes(self, split: str) -> Sequence[Scene]:
        """The scenes of the split `train` or `val`."""


class BlueMarbleSource:
    """Land, ocean and lake on Blue Marble, built into `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.class_table = blue_marble.CLASSES
        self.in_channels = 3

    def prepare(self) -> None:
        """Build the task where it is missing or damaged."""
        blue_marble.prepare(self.root)

    def scenes(self, split: str) -> Sequence[Scene]:
        """One scene: the region of the split."""
        scene = blue_marble.scene(self.root, split)
        scene.arrays()  # before the workers are forked, so that they share the pixels
        return [scene]


class FormatSource:
    """Pairs of files in one of the formats.

    Args:
        name: of the format, for messages.
        root: the folder of the data set.
        in_channels: channels of the images; None takes those of the format or the first training image.
        class_file: classes other than the format's own.
        open_cache: makes the cache of decoded files, given the folder; called once, when scenes are needed.
        skip_unreadable: whether pairs that cannot be read are named and left out.

    Raises:
        UserError: where the folder, its classes or its first image are missing or wrong.
    """

    def __init__(
        self,
        name: str,
        root: Path | None,
        in_channels: int | None = None,
        class_file: Path | None = None,
        open_cache: Callable[[Path], ArrayCache | None] = lambda root: None,
        *,
        skip_unreadable: bool = False,
    ) -> None:
        self.skip_unreadable = skip_unreadable
        self.form = load_format(name)
        self.root = check_root(name, root, self.form.LAYOUT)
        labelling = Labelling.from_file(class_file) if class_file else self.form.labelling(self.root)
        self.class_table = labelling.table
        channels, dtype = self._first_image()
        known = in_channels or self.form.CHANNELS
        self.in_channels = known or channels
        self.reader = PairReader(labelling, self.in_channels, dtype, grey=known == 3)
        self._open_cache: Callable[[Path], ArrayCache | None] | None = open_cache

    def _first_image(self) -> tuple[int, np.dtype[Any]]:
        """Channels and type of the first training image; without the split, of the first of another.

        Raises:
            UserError: where the split has no image, or the image cannot be read.
        """
        splits = self.form.splits(self.root)
        split = "train" if "train" in splits or not splits else splits[0]
        listing = self.form.listing(self.root, split)
        for _, message in listing.faults if not listing.images else ():
            raise UserError(message)
        images = listing.images.values()
        if self.form.WINDOWED:
            raster = first_readable(images, open_raster, skip=self.skip_unreadable)
            return raster.channels, raster.dtype
        image = first_readable(images, read_image, skip=self.skip_unreadable)
        return image.shape[2], image.dtype

    def prepare(self) -> None:
        """Nothing: the files are there."""

    def scenes(self, split: str) -> Sequence[Scene]:
        """One scene per pair."""
        if self._open_cache is not None:
            self.reader.cache = self._open_cache(self.root)
            self._open_cache = None
        return scenes(self.form, self.root, split, self.reader, skip_unreadable=self.skip_unreadable)


class SegmentationDataModule(LightningDataModule):
    """Batches of crops for training and of tiles for validation.

    A batch is a dict: `image` uint8 (8-bit images) or float32 in [0, 1] (16-bit ones), (B, C, H, W); `mask`
    int64 (B, H, W); `name` list of str. It shards over processes itself: give the Trainer
    `use_distributed_sampler=False`.

    Args:
        source: the scenes and classes.
        settings: sizes, shares, augmentation, workers.
        seed: seed of the run.
        batch_size: samples per step on one process.
        accumulate: steps of one optimizer step; an epoch is a whole number of optimizer steps.
    """

    def __init__(
        self, source: Source, settings: Settings, *, seed: int, batch_size: int, accumulate: int = 1
    ) -> None:
        super().__init__()
        self.source = source
        self.settings = settings
        self.seed = seed
        self.batch_size = batch_size
        self.accumulate = accumulate
        self._train: CropDataset | None = None
        self._val: TileDataset | None = None

    @property
    def class_table(self) -> ClassTable:
        """Names, colours and the ignored label."""
        return self.source.class_table

    @property
    def in_channels(self) -> int:
        """Channels of the images."""
        return self.source.in_channels

    def prepare_data(self) -> None:
        """Write what is needed on disk; Lightning calls it in one process of each machine."""
        self.source.prepare()

    def setup(self, stage: str | None = None) -> None:
        """Find the scenes and check them; `stage` other than `fit` needs those of validation only.

        Raises:
            UserError: naming the file or the setting that is wrong.
        """
        if stage in (None, "fit"):
            self.train_dataset()
        self.val_dataset()

    def train_dataset(self) -> CropDataset:
        """The training crops, made on first use."""
        if self._train is None:
            settings, table = self.settings, self.class_table
            self.source.prepare()
            scenes = self.source.scenes("train")
            rare: dict[int, list[int]] = {}
            if settings.rare_crop_share > 0:
                rare = find_rare(
                    scenes,
                    {name: table.index(name) for name in settings.rare_classes},
                    skip_unreadable=settings.skip_unreadable,
                )
            first = first_readable(
                scenes, lambda scene: scene.inside(Window(0, 0, 1, 1)), skip=settings.skip_unreadable
            )
            dtype = first[0].dtype
            settings.augment.check_images(self.in_channels, dtype)
            self._train = CropDataset(
                scenes,
                settings.image_size,
                seed=self.seed,
                augment=settings.augment,
                ignore_index=table.ignore_index,
                rare_share=settings.rare_crop_share,
                rare_scenes=rare,
                skip_unreadable=settings.skip_unreadable,
            )
        return self._train

    def val_dataset(self) -> TileDataset:
        """The tiles of validation, made on first use."""
        if self._val is None:
            self._val = self.tile_dataset("val")
        return self._val

    def tile_dataset(self, split: str) -> TileDataset:
        """The tiles of any split that the data have."""
        if split == "val" and self._val is not None:
            return self._val
        self.source.prepare()
        scenes = self.source.scenes(split)
        return TileDataset(
            scenes,
            self.settings.val_size,
            ignore_index=self.class_table.ignore_index,
            skip_unreadable=self.settings.skip_unreadable,
        )

    def train_dataloader(self) -> ResumableLoader:
        """The crops of this process; the sampler's epoch is set by Lightning."""
        dataset, (rank, world) = self.train_dataset(), self._place()
        step = self.batch_size * self.accumulate * world
        count = self.settings.samples_per_epoch or -(-len(dataset.scenes) // step) * step
        sampler = EpochSampler(count, seed=self.seed, rank=rank, world=world, multiple=step)
        return ResumableLoader(dataset, sampler, batch_size=self.batch_size, num_workers=self._workers())

    def val_dataloader(self) -> BatchLoader:
        """The tiles of this process; whole images come one by one where they differ in size."""
        return self.tile_loader("val")

    def tile_loader(self, split: str) -> BatchLoader:
        """As `val_dataloader`, of any split, in the order of `tile_dataset`."""
        dataset = self.val_dataset() if split == "val" else self.tile_dataset(split)
        rank, world = self._place()
        sampler = EverySampleSampler(len(dataset), rank=rank, world=world)
        sizes = {window[2:] for _, window in dataset.tiles}
        batch_size = self.batch_size if len(sizes) == 1 else 1
        return BatchLoader(
            dataset, sampler, batch_size=batch_size, num_workers=self._workers(), drop_last=False
        )

    def sample_for_picture(self, count: int) -> list[Sample]:
        """Up to `count` validation samples for a picture, the ones with most classes first.

        Of many tiles, 32 spread evenly are looked at. A sample is as in a batch, without its first dimension.
        """
        dataset = self.val_dataset()
        candidates = np.unique(np.linspace(0, len(dataset) - 1, _PICTURE_CANDIDATES).round().astype(int))
        scored: list[tuple[float, int]] = []
        for index in candidates:
            labels = dataset[int(index)]["mask"].numpy()
            counts = np.bincount(
                labels[labels < len(self.class_table)].ravel(), minlength=len(self.class_table)
            )
            shares = counts[counts > 0] / max(counts.sum(), 1)
            # The number of classes decides; among equals, how evenly they share the picture.
            evenness = float(-(shares * np.log(shares)).sum()) / np.log(max(len(counts), 2))
            scored.append((-(len(shares) + 0.999 * evenness), int(index)))
        samples = [dataset[index] for _, index in sorted(scored)[:count]]
        return [{**sample, "mask": sample["mask"].long()} for sample in samples]

    def _place(self) -> tuple[int, int]:
        trainer = self.trainer
        return (trainer.global_rank, trainer.world_size) if trainer is not None else (0, 1)

    def _workers(self) -> int:
        if self.settings.num_workers is not None:
            return self.settings.num_workers
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        return min(_MOST_WORKERS, max(1, cores // local - 1))
