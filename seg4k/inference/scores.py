"""Scores of one evaluation: per class, per image, as JSON, as a table and as a picture of the matrix."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from seg4k.data.classes import ClassTable
from seg4k.files import atomic_path
from seg4k.metrics import ConfusionMatrix

# Beyond this, numbers in the cells of the picture could not be read.
_MOST_CLASSES_WITH_NUMBERS = 20


@dataclass(frozen=True)
class ImageScore:
    """How one image or tile went: `miou` and `accuracy` are NaN where all of it is ignored."""

    name: str
    index: int
    miou: float
    accuracy: float


def image_score(name: str, index: int, labels: Tensor, mask: Tensor, classes: ClassTable) -> ImageScore:
    """Score one image: predicted labels and mask (H, W).

    Its mIoU is the mean over the classes that its mask or its prediction holds.
    """
    counts = ConfusionMatrix(len(classes), ignore_index=classes.ignore_index)
    counts.update(labels[None], mask[None])
    return ImageScore(name, index, float(counts.miou()), float(counts.accuracy()))


def worst(scores: Sequence[ImageScore], count: int) -> list[ImageScore]:
    """The `count` images of lowest mIoU, the worst first; those that are ignored as a whole are left out."""
    known = [score for score in scores if not math.isnan(score.miou)]
    return sorted(known, key=lambda score: (score.miou, score.accuracy, score.name))[:count]


def class_scores(counts: ConfusionMatrix, classes: ClassTable) -> list[dict[str, Any]]:
    """Per class IoU, precision and recall (None where undefined) and its pixels in the masks."""
    matrix = counts.matrix.double()
    hits = matrix.diagonal()
    columns = zip(
        classes.names,
        counts.iou().tolist(),
        (hits / matrix.sum(0)).tolist(),
        (hits / matrix.sum(1)).tolist(),
        counts.matrix.sum(1).tolist(),
        strict=True,
    )
    return [
        {
            "name": name,
            "iou": finite(iou),
            "precision": finite(precision),
            "recall": finite(recall),
            "pixels": int(pixels),
        }
        for name, iou, precision, recall, pixels in columns
    ]


def finite(value: float) -> float | None:
    """The value, or None for NaN, which JSON does not have."""
    return float(value) if math.isfinite(value) else None


def print_scores(rows: Sequence[dict[str, Any]], classes: ClassTable, title: str, footer: str) -> None:
    """Print a table with one line a class in its colour."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column("class")
    for heading in ("IoU", "precision", "recall", "pixels"):
        table.add_column(heading, justify="right")
    for row, colour in zip(rows, classes.colours, strict=True):
        numbers = ["-" if row[key] is None else f"{row[key]:.4f}" for key in ("iou", "precision", "recall")]
        name = f"[rgb({colour[0]},{colour[1]},{colour[2]})]■[/] {row['name']}"
        table.add_row(name, *numbers, f"{row['pixels']:,}")
    console = Console(soft_wrap=True)
    console.print(table)
    console.print(footer, highlight=False)


def draw_confusion(path: Path, counts: ConfusionMatrix, classes: ClassTable, title: str) -> None:
    """Write the confusion matrix as a PNG: each row is a true class, in shares of its pixels."""
    import matplotlib
    from matplotlib.figure import Figure

    matrix = counts.matrix.double().cpu().numpy()
    totals = matrix.sum(axis=1, keepdims=True)
    shares = np.divide(matrix, totals, out=np.zeros_like(matrix), where=totals > 0)
    size = len(classes)
    side = min(24.0, 3.0 + 0.55 * size)
    figure = Figure(figsize=(side + 1.0, side), dpi=110, layout="constrained")
    axes = figure.subplots()
    shown = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    names = [name if len(name) <= 24 else f"{name[:23]}…" for name in classes.names]
    axes.set_xticks(range(size), names, rotation=90 if size > 6 else 0, fontsize=8)
    axes.set_yticks(range(size), names, fontsize=8)
    axes.set_xlabel("predicted")
    axes.set_ylabel("truth, and its pixels as 100%")
    axes.set_title(title, fontsize=10)
    if size <= _MOST_CLASSES_WITH_NUMBERS:
        for row, column in np.ndindex(size, size):
            if totals[row, 0]:
                colour = "white" if shares[row, column] > 0.5 else "black"
                text = f"{shares[row, column]:.1%}"
                axes.text(column, row, text, ha="center", va="center", fontsize=8, color=colour)
    figure.colorbar(shown, ax=axes, shrink=0.8)
    with atomic_path(path) as temporary, matplotlib.rc_context({"savefig.facecolor": "white"}):
        figure.savefig(temporary)
