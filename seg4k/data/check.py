"""`seg4k check-data`: every file of a data set read once, and everything that is wrong with it named."""

import os
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from seg4k.data.build import build_reader
from seg4k.data.check_report import Report, print_report
from seg4k.data.formats.base import Format, Listing
from seg4k.data.scan import Fault, Found, scan_pair, scan_rasters
from seg4k.data.scenes import PairReader
from seg4k.data.settings import as_path, read_settings
from seg4k.errors import UserError
from seg4k.files import write_json

TRAINING = ("train", "val")  # what training cannot do without
_AHEAD = 4  # pairs a thread may be ahead of what was added up


def run(config: Mapping[str, Any]) -> int:
    """The verb: exit status 2 where training would fail."""
    path = as_path("output", config["output"]) / "check.json"  # before all the files are read
    report = check(config)
    print_report(report)
    write_json(path, report.to_dict())
    print(f"check.json: {path}")
    fatal = [fault for fault in report.faults if fault.fatal]
    if fatal:
        print(
            f"seg4k: error: training would fail: {len(fatal)} fault(s), the first: {fatal[0].message}",
            file=sys.stderr,
        )
        return 2
    return 0


def check(config: Mapping[str, Any]) -> Report:
    """Read everything, in as many threads as asked for; memory does not grow with the number of files.

    Args:
        config: conf/check_data.yaml as plain values.

    Raises:
        UserError: a mistake in the configuration, or classes that cannot be read.
    """
    threads = (os.cpu_count() or 1) if config["threads"] is None else config["threads"]
    if not isinstance(threads, int) or isinstance(threads, bool) or threads < 1:
        raise UserError(f"threads={threads}: give a whole number from 1 up, or null for as many as cores")
    asked = _asked(config["splits"])
    settings = read_settings(config["data"])
    form, root, reader = build_reader(config["data"])
    report = Report(config["data"]["name"], root, reader, settings)
    started = time.monotonic()
    found = [split for split in form.splits(root) if split not in TRAINING]
    for split in asked or [*TRAINING, *found]:
        # A split that was asked for by its name must be there.
        _check_split(form, root, split, reader, report, threads, must_be=bool(asked) or split in TRAINING)
    report.finish(time.monotonic() - started)
    return report


def _asked(splits: object) -> list[str]:
    """The names that were given, each once; none where all splits are to be read.

    Raises:
        UserError: where it is no name and no list of names.
    """
    if splits is None:
        return []
    names = [splits] if isinstance(splits, str) else splits
    if not isinstance(names, list) or not names or not all(isinstance(x, str) and x for x in names):
        raise UserError(f"splits={splits}: give a list of splits, such as [train,val], or null for all")
    return list(dict.fromkeys(names))


def _check_split(
    form: Format,
    root: Path,
    split: str,
    reader: PairReader,
    report: Report,
    threads: int,
    *,
    must_be: bool,
) -> None:
    try:
        listing = form.listing(root, split)
    except UserError as error:
        report.add_fault(split, Fault("layout", root, str(error), must_be))
        return
    needed = split in TRAINING
    for path, message in listing.faults:
        report.add_fault(split, Fault("layout", path, message, needed or (must_be and not listing.images)))
    for name, message in listing.missing().items():
        if listing.masks or needed:  # the images of a test set have no masks
            report.add_fault(split, Fault("missing mask", listing.images[name], message, needed))
    for name, message in listing.extra().items():
        report.add_fault(split, Fault("extra mask", listing.masks[name], message, fatal=False))
    for found in _progress(_scan(form, listing, reader, threads), split, len(listing.images)):
        report.add(split, found)


def _scan(form: Format, listing: Listing, reader: PairReader, threads: int) -> Iterator[Found]:
    """The pairs in order; only a few of them are under way at a time."""
    scan = scan_rasters if form.WINDOWED else scan_pair
    with ThreadPoolExecutor(threads) as pool:  # decoding, hashing and counting release the interpreter
        jobs = ((image, listing.masks.get(name)) for name, image in listing.images.items())
        waiting: list[Future[Found]] = []
        for image, mask in jobs:
            waiting.append(pool.submit(scan, image, mask, reader))
            if len(waiting) > threads * _AHEAD:
                yield waiting.pop(0).result()
        for future in waiting:
            yield future.result()


def _progress(found: Iterator[Found], split: str, total: int) -> Iterator[Found]:
    from rich.progress import track

    yield from track(found, f"check {split}", total=total, disable=not sys.stdout.isatty())
