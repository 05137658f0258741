"""`seg4k evaluate`: a checkpoint held against any data of the same classes."""

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from seg4k.data.build import build_datamodule
from seg4k.data.classes import ClassTable
from seg4k.data.datamodule import SegmentationDataModule
from seg4k.data.settings import as_path
from seg4k.errors import UserError
from seg4k.files import write_json
from seg4k.inference.scores import (
    ImageScore,
    class_scores,
    draw_confusion,
    finite,
    image_score,
    print_scores,
    worst,
)
from seg4k.inference.segmenter import Segmenter, load_segmenter
from seg4k.metrics import ConfusionMatrix
from seg4k.training.pictures import draw_samples

SCHEMA = 1


def run(config: Mapping[str, Any]) -> int:
    """The verb: `evaluate`, with an exit status."""
    evaluate(config)
    return 0


def evaluate(config: Mapping[str, Any]) -> dict[str, Any]:
    """Evaluate, print a table, and write evaluation.json, confusion.png and worst.png.

    Args:
        config: conf/evaluate.yaml as plain values.

    Returns:
        What evaluation.json holds.

    Raises:
        UserError: a mistake in the configuration or the data, or classes that are not the checkpoint's.
    """
    _check_counts(config)
    if not isinstance(config["split"], str) or not config["split"]:
        raise UserError(f"split={config['split']}: give the name of one split, such as val")
    directory = as_path("output", config["output"])
    checkpoint = None if config["checkpoint"] is None else as_path("checkpoint", config["checkpoint"])
    segmenter = load_segmenter(checkpoint, config["accelerator"], config["precision"])
    settings = data_settings(config["data"], segmenter.config["data"])
    data = build_datamodule(settings, seed=0, batch_size=config["batch"])
    check_classes(data.class_table, segmenter.classes)
    if data.in_channels != segmenter.in_channels:
        raise UserError(
            f"the images have {data.in_channels} channels, but the checkpoint takes {segmenter.in_channels}; "
            "convert the images, or set data.in_channels"
        )
    started = time.monotonic()
    counts, scores = _count(segmenter, data, config["split"])
    seconds = time.monotonic() - started
    shown = worst(scores, config["worst"])
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "checkpoint": str(checkpoint),
        "data": {"name": settings["name"], "root": settings.get("root"), "split": config["split"]},
        "precision": segmenter.precision,
        "device": str(segmenter.device),
        "images": len(scores),
        "seconds": seconds,
        "miou": finite(float(counts.miou())),
        "accuracy": finite(float(counts.accuracy())),
        "classes": class_scores(counts, segmenter.classes),
        "confusion": counts.matrix.tolist(),
        "worst": [{"name": score.name, "miou": score.miou, "accuracy": score.accuracy} for score in shown],
        "scores": [
            {"name": score.name, "miou": finite(score.miou), "accuracy": finite(score.accuracy)}
            for score in scores
        ],
    }
    title = f"{Path(str(checkpoint)).name} on {settings['name']}, {config['split']}"
    draw_confusion(directory / "confusion.png", counts, segmenter.classes, title)
    if shown:
        _draw_worst(directory / "worst.png", segmenter, data, config["split"], shown)
    write_json(directory / "evaluation.json", result)
    print_scores(
        result["classes"],
        segmenter.classes,
        f"{title}: {len(scores)} images or tiles",
        f"mIoU {_number(result['miou'])}, accuracy {_number(result['accuracy'])}, {seconds:.1f} s\n"
        f"evaluation.json and pictures: {directory}",
    )
    return result


def data_settings(given: Mapping[str, Any], trained: Mapping[str, Any]) -> dict[str, Any]:
    """The group `data` to evaluate on: as given, or the checkpoint's with what was set over it."""
    if given["name"] == "checkpoint":
        chosen = {**trained, **{key: value for key, value in given.items() if value is not None}}
        chosen["name"] = trained["name"]
    else:
        chosen = dict(given)
    # What concerns training alone must not stand in the way.
    if "cache" in chosen:
        chosen["cache"] = "none"
    return {**chosen, "rare_crop_share": 0.0, "rare_classes": [], "augment": None}


def check_classes(data: ClassTable, trained: ClassTable) -> None:
    """Refuse data whose classes are not those of the checkpoint, in the same order.

    Raises:
        UserError: naming the first class that differs.
    """
    if data.names == trained.names:
        return
    advice = "; a dataset to evaluate on has the classes of the checkpoint, in the same order"
    if len(data) != len(trained):
        raise UserError(f"the data have {len(data)} classes, the checkpoint {len(trained)}{advice}")
    label = next(label for label in range(len(data)) if data.names[label] != trained.names[label])
    raise UserError(
        f"class {label} of the data is {data.names[label]!r}, of the checkpoint "
        f"{trained.names[label]!r}{advice}"
    )


def _count(
    segmenter: Segmenter, data: SegmentationDataModule, split: str
) -> tuple[ConfusionMatrix, list[ImageScore]]:
    from rich.progress import track

    counts = ConfusionMatrix(len(segmenter.classes), ignore_index=data.class_table.ignore_index)
    scores: list[ImageScore] = []
    loader = data.tile_loader(split)
    # Per image the table of the data decides what is ignored; its classes are the checkpoint's.
    for batch in track(loader, "evaluate", total=len(loader), disable=not sys.stdout.isatty()):
        labels = segmenter.labels(batch["image"]).cpu()
        counts.update(labels, batch["mask"])
        for name, predicted, mask in zip(batch["name"], labels, batch["mask"], strict=True):
            scores.append(image_score(name, len(scores), predicted, mask, data.class_table))
    return counts, scores


def _draw_worst(
    path: Path,
    segmenter: Segmenter,
    data: SegmentationDataModule,
    split: str,
    shown: list[ImageScore],
) -> None:
    dataset = data.tile_dataset(split)
    samples = [dataset[score.index] for score in shown]
    draw_samples(
        path,
        [sample["image"] for sample in samples],
        [sample["mask"].long() for sample in samples],
        [segmenter.labels(sample["image"][None])[0].cpu() for sample in samples],
        data.class_table,
        title="worst first: "
        + ", ".join(f"{score.name} (mIoU {score.miou:.3f})" for score in shown[:3])
        + (", ..." if len(shown) > 3 else ""),
    )


def _check_counts(config: Mapping[str, Any]) -> None:
    for key, least in (("batch", 1), ("worst", 0)):
        value = config[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise UserError(f"{key}={value}: give a whole number from {least} up")


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4f}"
