"""metrics.csv: a line at a time, so that a killed run keeps its curve, and a resumed one goes on with it."""

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from seg4k.files import write_text


class MetricsCsv(Logger):
    """Writes each line as it comes. Columns: step (optimizer steps done), then the metrics.

    Args:
        path: the file.
        resumed_step: where a run is gone on with, the step of its checkpoint; lines beyond it are dropped,
            and those of a validation at it, which is done again. None begins the file anew.
    """

    def __init__(self, path: Path, resumed_step: int | None = None) -> None:
        super().__init__()
        self.path = path
        self.columns: list[str] = ["step"]
        self.rows: list[dict[str, str]] = []
        self._resumed_step = resumed_step
        self._begun = False

    @property
    def name(self) -> str:
        """Nothing: the file lies in the run directory itself."""
        return ""

    @property
    def version(self) -> str:
        """Nothing, likewise."""
        return ""

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Nothing: the run card holds the configuration."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write one line."""
        if not self._begun:
            self._begin()
        row = {"step": str(step), **{key: repr(float(value)) for key, value in metrics.items()}}
        self.rows.append(row)
        new = [key for key in row if key not in self.columns]
        self.columns += new
        if new or not self.path.is_file():
            write_text(self.path, self._text(self.rows, header=True))
        else:
            with self.path.open("a", encoding="utf-8", newline="") as file:
                file.write(self._text([row], header=False))

    def _begin(self) -> None:
        self._begun = True
        if self._resumed_step is None:
            self.path.unlink(missing_ok=True)
        elif self.path.is_file():
            with self.path.open(encoding="utf-8", newline="") as file:
                reader = csv.DictReader(file)
                self.columns = list(reader.fieldnames or self.columns)
                for row in reader:
                    if _goes_before(row, self._resumed_step):
                        self.rows.append({key: value for key, value in row.items() if value})
            write_text(self.path, self._text(self.rows, header=True))

    def _text(self, rows: list[dict[str, str]], *, header: bool) -> str:
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns, restval="", lineterminator="\n")
        if header:
            writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()


def _goes_before(row: Mapping[str | None, Any], step: int) -> bool:
    """Whether a line is whole and of what the checkpoint of `step` holds."""
    text = row.get("step")
    if None in row or None in row.values() or not isinstance(text, str) or not text.isdigit():
        return False
    of_validation = any(value for key, value in row.items() if str(key).startswith("val_"))
    return int(text) < step or (int(text) == step and not of_validation)
