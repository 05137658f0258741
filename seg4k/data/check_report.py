"""What a check of a data set adds up to: as JSON and as text."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from seg4k.data.scan import Fault, Found, Moments
from seg4k.data.scenes import PairReader
from seg4k.data.settings import Settings
from seg4k.errors import UserError

SCHEMA = 1
_SKIPPED = ("unreadable", "empty", "bit depth", "channels", "size", "label")  # by data.on_error=skip
_SHOWN = 20  # faults and sizes that are printed; check.json has all


class Report:
    """Adds up what `scan` finds, pair by pair.

    Args:
        name: of the format.
        root: of the data set.
        reader: says the classes; its type, and its channels where they are 0, are set by the first image that
            can be read.
        settings: of training, of which some ask something of the data.
    """

    def __init__(self, name: str, root: Path, reader: PairReader, settings: Settings) -> None:
        self.name = name
        self.root = root
        self.reader = reader
        self.settings = settings
        self.faults: list[Fault] = []
        self._splits: list[str] = []  # of each fault
        self._dtype: np.dtype[Any] | None = None
        self._sizes: Counter[tuple[int, int]] = Counter()
        self._digests: dict[str, tuple[str, Path]] = {}
        self._counts: dict[str, Counter[int]] = {}
        self._images: dict[str, int] = {}
        self._usable: Counter[str] = Counter()  # pairs of each split that training does not leave out
        self._images_with: Counter[int] = Counter()  # training images that have a label
        self._pixels_with: Counter[int] = Counter()  # valid pixels of those images
        self._moments = Moments()
        self.seconds = 0.0

    def add_fault(self, split: str, fault: Fault) -> None:
        """Note a fault of a split."""
        if self.settings.skip_unreadable and fault.kind in _SKIPPED:
            fault = replace(fault, fatal=False)
        self.faults.append(fault)
        self._splits.append(split)

    def add(self, split: str, found: Found) -> None:
        """Add a pair."""
        self._images[split] = self._images.get(split, 0) + 1
        self._usable[split] += all(fault.kind not in _SKIPPED for fault in found.faults)
        for fault in found.faults:
            self.add_fault(split, fault)
        if found.digest is not None:
            other, path = self._digests.setdefault(found.digest, (split, found.image))
            if other != split:
                message = (
                    f"{found.image} of {split} is the same file as {path} of {other}; remove one of "
                    "the two, or the scores of one split are no measure."
                )
                self.add_fault(split, Fault("duplicate", found.image, message, fatal=False))
        if found.channels is not None and found.dtype is not None and found.size is not None:
            self._sizes[found.size] += 1
            self._check_kind(split, found)
        counts = self._counts.setdefault(split, Counter())
        counts.update(found.counts)
        if split == "train":
            valid = sum(n for label, n in found.counts.items() if label < len(self.reader.labelling.table))
            for label in found.counts:
                self._images_with[label] += 1
                self._pixels_with[label] += valid
            if found.moments is not None and len(found.moments.first) == self.reader.channels:
                self._moments.add(found.moments)

    def _check_kind(self, split: str, found: Found) -> None:
        """Hold channels and bits of an image against those of the first, as training does."""
        assert found.channels is not None
        assert found.dtype is not None
        if self._dtype is None:
            self._dtype = self.reader.dtype = found.dtype
            self.reader.channels = self.reader.channels or found.channels
        try:
            self.reader.check(found.image, found.channels, found.dtype)
        except UserError as error:
            kind = "bit depth" if self.reader.fits(found.channels, found.dtype) else "channels"
            self.add_fault(split, Fault(kind, found.image, str(error), fatal=split in ("train", "val")))

    def finish(self, seconds: float) -> None:
        """All pairs are added: what the settings of training ask of the data."""
        self.seconds = seconds
        table = self.reader.labelling.table
        for split in ("train", "val"):
            if self.settings.skip_unreadable and self._images.get(split) and not self._usable[split]:
                message = f"data.on_error=skip leaves out every pair of {split}; mend or replace the files."
                self.add_fault(split, Fault("settings", self.root, message))
        if self._dtype is not None:
            try:
                self.settings.augment.check_images(self.reader.channels, self._dtype)
            except UserError as error:
                self.add_fault("train", Fault("settings", self.root, str(error)))
        for name in self.settings.rare_classes:
            if self.settings.rare_crop_share > 0 and not self._images_with[table.index(name)]:
                message = f"The rare class {name!r} is in no training mask; remove it from data.rare_classes."
                self.add_fault("train", Fault("settings", self.root, message))

    @property
    def passed(self) -> bool:
        """Whether training would not fail of the data."""
        return not any(fault.fatal for fault in self.faults)

    def class_weights(self) -> list[float | None]:
        """Median frequency balancing over the training pixels; None for a class that has none.

        The frequency of a class is its share of the valid pixels of the images that have it; its weight is
        the median frequency over its own (Eigen and Fergus, arXiv 1411.4734).
        """
        counts = self._counts.get("train", Counter())
        labels = range(len(self.reader.labelling.table))
        frequencies = {x: counts[x] / self._pixels_with[x] for x in labels if counts[x]}
        middle = median(frequencies.values()) if frequencies else 0.0
        return [middle / frequencies[x] if x in frequencies else None for x in labels]

    def to_dict(self) -> dict[str, Any]:
        """The content of check.json."""
        table = self.reader.labelling.table
        weights = self.class_weights()
        known = self._moments.pixels > 0
        images = sum(self._images.values())
        return {
            "schema": SCHEMA,
            "data": {"name": self.name, "root": str(self.root)},
            "passed": self.passed,
            "images": self._images,
            "seconds": self.seconds,
            "pairs_per_second": images / self.seconds if self.seconds else None,
            "faults": [
                {**vars(fault), "file": str(fault.file), "split": split}
                for fault, split in zip(self.faults, self._splits, strict=True)
            ],
            "classes": [
                {
                    "label": label,
                    "name": name,
                    "pixels": {split: counts[label] for split, counts in self._counts.items()},
                    "training_images": self._images_with[label],
                    "suggested_weight": weights[label],
                }
                for label, name in enumerate(table.names)
            ],
            "ignored_pixels": {split: counts[table.ignore_index] for split, counts in self._counts.items()},
            "sizes": [
                {"height": size[0], "width": size[1], "images": count}
                for size, count in self._sizes.most_common()
            ],
            "channels": self.reader.channels if self._dtype is not None else None,
            "bits": self._dtype.itemsize * 8 if self._dtype is not None else None,
            "mean": self._moments.mean if known else None,
            "std": self._moments.std if known else None,
        }


def print_report(report: Report) -> None:
    """Print classes, sizes and every kind of fault."""
    from rich.console import Console
    from rich.table import Table

    content = report.to_dict()
    console = Console(soft_wrap=True, highlight=False)
    splits = list(content["images"])
    table = Table(title=f"{report.name}: {report.root}", title_justify="left")
    table.add_column("class")
    for split in splits:
        table.add_column(f"{split}, share of pixels", justify="right")
    table.add_column("training images", justify="right")
    table.add_column("suggested weight", justify="right")
    totals = {split: sum(entry["pixels"].get(split, 0) for entry in content["classes"]) for split in splits}
    for entry in content["classes"]:
        shares = [f"{entry['pixels'].get(split, 0) / max(totals[split], 1):.3%}" for split in splits]
        weight = entry["suggested_weight"]
        table.add_row(
            entry["name"],
            *shares,
            str(entry["training_images"]),
            "absent" if weight is None else f"{weight:.3g}",
        )
    console.print(table)
    sizes = content["sizes"][:_SHOWN]
    more = f" and {len(content['sizes']) - len(sizes)} more" if len(content["sizes"]) > len(sizes) else ""
    shown = ", ".join(f"{size['height']}x{size['width']} ({size['images']})" for size in sizes)
    print(f"sizes, height x width (images): {shown or 'none'}{more}")
    if content["mean"] is not None:
        numbers = [", ".join(f"{value:.4f}" for value in content[key]) for key in ("mean", "std")]
        print(
            f"{content['channels']} channels of {content['bits']} bits; mean {numbers[0]}; std {numbers[1]}"
        )
    if any(entry["suggested_weight"] is not None for entry in content["classes"]):
        weights = [entry["suggested_weight"] or 1.0 for entry in content["classes"]]
        print(f"loss.class_weights=[{','.join(f'{weight:.3g}' for weight in weights)}]")
    count = sum(content["images"].values())
    speed = f" ({content['pairs_per_second']:.1f} pairs/s)" if content["pairs_per_second"] else ""
    print(f"{count} images in {report.seconds:.1f} s{speed}")
    kinds = Counter(fault.kind for fault in report.faults)
    for kind, number in kinds.most_common():
        faults = [fault for fault in report.faults if fault.kind == kind]
        effect = "training would fail" if any(fault.fatal for fault in faults) else "training would go on"
        print(f"\n{kind}: {number}, {effect}")
        for fault in faults[:_SHOWN]:
            print(f"  {fault.message}")
        if number > _SHOWN:
            print(f"  ... {number - _SHOWN} more in check.json")
    if not kinds:
        print("nothing wrong")
