"""Numbers as a person reads them."""

from collections.abc import Mapping
from typing import Any

PARITY = {
    "exact": "exact",
    "within_margin": "within margin",
    "outside_margin": "OUTSIDE MARGIN",
    "inconclusive": "inconclusive",
}
STATUS = {
    "completed": "completed",
    "out_of_memory": "out of memory",
    "failed": "failed",
    "interrupted": "interrupted",
}


def size(count: float | None) -> str:
    """Bytes as text: GiB from 1 GiB on, MiB below; a dash for None."""
    if count is None:
        return "-"
    unit, name = (2**30, "GiB") if abs(count) >= 2**30 else (2**20, "MiB")
    return f"{three_digits(count / unit)} {name}"


def percent(share: float, *, signed: bool = False) -> str:
    """A share as percent: 0.284 -> `28%`; below 10%, one digit after the point."""
    value = 100 * share
    text = f"{abs(value):.0f}" if abs(value) >= 9.95 else f"{abs(value):.1f}"
    if float(text) == 0:
        return "0%"
    return f"{'-' if value < 0 else '+' if signed else ''}{text}%"


def three_digits(value: float | None) -> str:
    """A number to three digits, without powers of ten from 0.001 to a million: 19.9, 0.948, 1,270."""
    if value is None:
        return "-"
    if abs(value) >= 999.5:
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".")


def group_name(strategy: str, devices: int) -> str:
    """Strategy and device count: `DDP x2`, also for a class name as `DDPStrategy`."""
    return f"{strategy.removesuffix('Strategy') or 'one device'} x{devices}"


def ratio(row: Mapping[str, Any]) -> str:
    """The peak of a mode against the baseline's: `0.36 (-64%)`."""
    if row["peak_ratio"] is not None:
        return f"{row['peak_ratio']:.2f} ({percent(row['peak_ratio'] - 1, signed=True)})"
    if row["peak_ratio_at_most"] is not None:
        return f"≤ {row['peak_ratio_at_most']:.2f}"
    return "-"


def slowdown(row: Mapping[str, Any]) -> str:
    """Median slowdown with its range over seeds: `1.08 (1.07 to 1.10)`."""
    if row["slowdown"] is None:
        return "-"
    low, high = (f"{value:.2f}" for value in row["slowdown_range"])
    return f"{row['slowdown']:.2f}" + (f" ({low} to {high})" if low != high else "")


def miou(value: float | None) -> str:
    """An mIoU with four digits."""
    return "-" if value is None else f"{value:.4f}"


def delta(value: float | None, *, signed: bool = False) -> str:
    """A difference of mIoU; `0` only where it is zero to the bit."""
    if value is None:
        return "-"
    return "0" if value == 0 else f"{value:+.1e}" if signed else f"{value:.1e}"


def shorten(text: str | None, most: int = 160) -> str:
    """An error message on one line."""
    line = " ".join((text or "").split())
    return line if len(line) <= most else line[: most - 1] + "…"
