"""What is printed at the end of a run: a short table per class, and what the run cost."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from seg4k.data.classes import ClassTable
from seg4k.training.run_card import readable_bytes

MOST_WAITING = 0.05


def print_summary(card: Mapping[str, Any], classes: ClassTable, directory: Path) -> None:
    """Print IoU per class in its colour, mIoU, peak memory, speed, and where everything lies."""
    from rich.console import Console
    from rich.table import Table

    metrics, speed = card["metrics"], card["throughput"]
    table = Table(title=f"validation, {metrics['val_samples']} samples", title_justify="left")
    table.add_column("class")
    table.add_column("IoU", justify="right")
    for name, colour in zip(classes.names, classes.colours, strict=True):
        iou = metrics["val_iou"].get(name)
        absent = iou is None or iou != iou  # NaN: neither in a mask nor predicted
        table.add_row(
            f"[rgb({colour[0]},{colour[1]},{colour[2]})]■[/] {name}", "absent" if absent else f"{iou:.4f}"
        )
    table.add_section()
    table.add_row("mIoU", "none" if metrics["val_miou"] is None else f"{metrics['val_miou']:.4f}")
    console = Console(soft_wrap=True)
    console.print(table)
    rate = speed["samples_per_second"]
    console.print(
        f"peak memory {readable_bytes(card['memory']['peak_bytes'])}, "
        + ("speed not measured" if rate is None else f"{rate:.3g} samples/s")
    )
    if hint := waiting_hint(speed["data_wait_fraction"], card["config"]["data"]):
        console.print(hint, highlight=False)
    console.print(f"run card, weights and pictures: {directory}", highlight=False)


def waiting_hint(fraction: float | None, data: Mapping[str, Any]) -> str | None:
    """What to do where more than `MOST_WAITING` of the time went into waiting for data; None below that.

    Args:
        fraction: `data_wait_fraction` of the run card.
        data: the config group.
    """
    if fraction is None or fraction <= MOST_WAITING:
        return None
    ways = ["more data.num_workers, up to the cores there are"]
    if data.get("cache") == "none":
        ways.append("data.cache=ram or disk, which keeps decoded images")
    ways.append("less data.augment.colour, the dearest of the augmentations")
    return f"{fraction:.0%} of the time went into waiting for data; try " + ", or ".join(ways)
