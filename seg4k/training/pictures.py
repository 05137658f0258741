"""Image, truth and prediction side by side, in the colours of the classes, with their names."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from seg4k.data.classes import ClassTable
from seg4k.files import atomic_path

IGNORED = (225, 225, 225)


def draw_samples(
    path: Path,
    images: Sequence[Tensor],
    masks: Sequence[Tensor],
    predictions: Sequence[Tensor],
    classes: ClassTable,
    title: str = "",
) -> None:
    """Write a PNG with one row a sample.

    Args:
        path: the file to write, atomically.
        images: (C, H, W) uint8 or float in [0, 1]; the first three channels are shown, one channel as grey.
        masks: (H, W) labels; `ignore_index` is drawn in a pale grey.
        predictions: (H, W) labels.
        classes: names and colours.
        title: a line above.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = len(images)
    ratio = images[0].shape[-2] / images[0].shape[-1]
    figure = Figure(figsize=(9.6, 3.1 * rows * ratio + 1.0), dpi=110, layout="constrained")
    axes = figure.subplots(rows, 3, squeeze=False)
    for row, (image, mask, prediction) in enumerate(zip(images, masks, predictions, strict=True)):
        labels, predicted = mask.cpu().numpy(), prediction.cpu().numpy()
        valid = labels != classes.ignore_index
        right = float((labels == predicted)[valid].mean()) if valid.any() else float("nan")
        panels = (
            (_displayable(image), "image"),
            (classes.to_rgb(labels, ignored=IGNORED), "truth"),
            (classes.to_rgb(predicted, ignored=IGNORED), f"prediction, {right:.1%} of pixels right"),
        )
        for column, (panel, name) in enumerate(panels):
            axes[row, column].imshow(panel, interpolation="nearest")
            axes[row, column].set_axis_off()
            axes[row, column].set_title(name, fontsize=9)
    shown = range(min(len(classes), 30))
    colours = [tuple(value / 255 for value in classes.colours[label]) for label in shown]
    figure.legend(
        [Patch(facecolor=(red, green, blue), edgecolor="0.4") for red, green, blue in colours],
        [classes.names[label] for label in shown],
        loc="outside lower center",
        ncols=min(6, len(shown)),
        fontsize=9,
        frameon=False,
    )
    if title:
        figure.suptitle(title, fontsize=10)
    with atomic_path(path) as temporary, matplotlib.rc_context({"savefig.facecolor": "white"}):
        figure.savefig(temporary)


def _displayable(image: Tensor) -> NDArray[np.uint8]:
    shown = image[:3] if image.shape[0] >= 3 else image[:1].expand(3, -1, -1)
    shown = shown.cpu()
    if shown.dtype != torch.uint8:
        shown = (shown.float().clamp(0, 1) * 255).to(torch.uint8)
    return shown.permute(1, 2, 0).numpy()
