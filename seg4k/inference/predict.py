"""`seg4k predict`: masks for a file or a folder of images, whole or by windows, resumed where it stopped."""

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seg4k.data.images import list_images
from seg4k.data.settings import as_path
from seg4k.errors import UserError
from seg4k.files import write_json
from seg4k.inference.one_image import Options, Predictor, predict_array, predict_raster
from seg4k.inference.segmenter import Segmenter, load_segmenter
from seg4k.memory.shortage import is_out_of_memory

SCHEMA = 1
FLIPS = ("horizontal", "vertical")
FOLDERS = ("masks", "overlays", "probabilities")


@dataclass(frozen=True)
class Job:
    """One image and where its files go; `mask` is written last and so says that all is done."""

    image: Path
    mask: Path
    overlay: Path
    probabilities: Path


def run(config: Mapping[str, Any]) -> int:
    """Predict every image that has no mask yet.

    Raises:
        UserError: a mistake in the configuration; or, when all else is done, images that could not be read.
    """
    options = _options(config)
    if not config["input"] or not config["output"]:
        raise UserError("set input=FOLDER or input=FILE, and output=FOLDER")
    source, output = as_path("input", config["input"]), as_path("output", config["output"])
    jobs = _jobs(list_images(source), source, output)
    segmenter = load_segmenter(config["checkpoint"], config["accelerator"], config["precision"])
    settings = _settings(config, segmenter)
    _begin(output, settings, jobs, overwrite=config["overwrite"])
    left = [job for job in jobs if not job.mask.is_file()]
    if len(left) < len(jobs):
        print(f"{len(jobs) - len(left)} of {len(jobs)} images have a mask: done before")
    failed = _predict_all(Predictor(segmenter, options), left)
    failures = [{"image": str(path), "error": error} for path, error in failed.items()]
    write_json(output / "predict.json", {**settings, "failed": failures})
    print(f"{len(left) - len(failed)} predicted, {len(jobs) - len(left)} done before, {len(failed)} failed")
    print(f"masks and overlays: {output}")
    if failed:
        first, error = next(iter(failed.items()))
        raise UserError(
            f"{len(failed)} of {len(jobs)} images could not be predicted, the first {first}: {error} All "
            f"others are done; {output / 'predict.json'} names each. Mend and repeat."
        )
    return 0


def _predict_all(predictor: Predictor, jobs: list[Job]) -> dict[Path, str]:
    from rich.progress import track

    failed: dict[Path, str] = {}
    for job in track(jobs, "predict", disable=not sys.stdout.isatty() or not jobs):
        try:
            _predict_one(predictor, job)
        except UserError as error:
            failed[job.image] = str(error)
            print(f"failed: {error}", file=sys.stderr, flush=True)
    return failed


def _predict_one(predictor: Predictor, job: Job) -> None:
    """Predict an image; by windows after all, where it was to be seen whole and memory ran out."""
    predict = predict_raster if job.mask.suffix == ".tif" else predict_array
    while True:
        try:
            predict(predictor, job.image, job.mask, job.overlay, job.probabilities)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        else:
            return
        # Outside the except block, whose traceback holds the tensors.
        if not predictor.give_up_wholes():
            raise UserError(
                f"{job.image}: memory ran out; set smaller windows, such as window=[512,512], or lower "
                "window_batch, block_bytes or scales."
            )


def _jobs(images: list[Path], source: Path, output: Path) -> list[Job]:
    """Where the files of each image go: below `output`, in the folders that the images are in."""
    from seg4k.data.rasters import is_georeferenced

    base = source if source.is_dir() else source.parent
    made = [(output / folder).resolve() for folder in FOLDERS]
    images = [image for image in images if not any(map(image.resolve().is_relative_to, made))]
    if not images:
        raise UserError(f"input={source}: only what was written to output={output}; choose another output")
    stems = [image.relative_to(base).with_suffix("") for image in images]
    times = Counter(stems)
    jobs: list[Job] = []
    for image, stem in zip(images, stems, strict=True):
        # a.png and a.jpg become a.png.png and a.jpg.png.
        name = str(image.relative_to(base)) if times[stem] > 1 else str(stem)
        suffix = ".tif" if is_georeferenced(image) else ".png"
        jobs.append(
            Job(
                image,
                output / "masks" / f"{name}{suffix}",
                output / "overlays" / f"{name}.jpg",
                output / "probabilities" / f"{name}.npy",
            )
        )
    return jobs


def _settings(config: Mapping[str, Any], segmenter: Segmenter) -> dict[str, Any]:
    keys = ("window", "overlap", "flips", "scales", "overlays", "probabilities")
    checkpoint = Path(config["checkpoint"])
    with checkpoint.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {
        "schema": SCHEMA,
        "checkpoint": {"path": str(checkpoint.resolve()), "sha256": digest},
        "precision": segmenter.precision,
        **{key: config[key] for key in keys},
        "classes": segmenter.classes.to_dict(),
    }


def _begin(output: Path, settings: dict[str, Any], jobs: list[Job], *, overwrite: bool) -> None:
    """Note the settings at the start; refuse to go on with others, whose masks would lie among these.

    To overwrite begins by removing the masks, so that none of another setting is left where it is stopped.
    """
    path = output / "predict.json"
    if overwrite:
        for job in jobs:
            job.mask.unlink(missing_ok=True)
    elif path.is_file():
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            before = {}
        different = [key for key, value in settings.items() if _judged(before.get(key)) != _judged(value)]
        if different:
            raise UserError(
                f"{output} holds predictions by another {' and '.join(different)}; choose another output, or "
                "overwrite=true"
            )
    write_json(path, settings)


def _judged(value: Any) -> Any:  # noqa: ANN401 - any setting
    """What tells settings apart: of a checkpoint its content, wherever it lies."""
    return value["sha256"] if isinstance(value, dict) and "sha256" in value else value


def _options(config: Mapping[str, Any]) -> Options:
    window, flips, scales = config["window"], config["flips"], config["scales"]
    if window not in ("auto", "whole") and not (
        isinstance(window, list) and len(window) == 2 and all(_whole(side, 1) for side in window)
    ):
        raise UserError(f"window={window}: give auto, whole, or [height, width] in pixels")
    if not isinstance(flips, list) or not set(flips) <= set(FLIPS):
        raise UserError(f"flips={flips}: give a list of {' and '.join(FLIPS)}, or [] for none")
    if not isinstance(scales, list) or not scales or not all(_number(scale, 0.1, 10) for scale in scales):
        raise UserError(f"scales={scales}: give a list of numbers from 0.1 to 10, such as [0.75,1.0,1.25]")
    if not _number(config["overlap"], 0.0, 0.9):
        raise UserError(f"overlap={config['overlap']}: give a number from 0 to 0.9")
    for key in ("window_batch", "block_bytes"):
        if not _whole(config[key], 1):
            raise UserError(f"{key}={config[key]}: give a whole number from 1 up")
    return Options(
        window=tuple(window) if isinstance(window, list) else window,
        overlap=float(config["overlap"]),
        window_batch=config["window_batch"],
        flips=tuple(flips),
        scales=tuple(float(scale) for scale in scales),
        overlays=config["overlays"],
        probabilities=config["probabilities"],
        block_bytes=config["block_bytes"],
    )


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _number(value: object, least: float, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most
