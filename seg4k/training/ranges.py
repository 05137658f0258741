"""The numbers of a training configuration and the ranges they must lie in, in one table."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from seg4k.errors import UserError


class Range(NamedTuple):
    """From `least` to `greatest`, which itself is left out where `below`; `many`: each number of a list."""

    least: float
    greatest: float = math.inf
    whole: bool = False
    below: bool = False
    many: bool = False

    def __str__(self) -> str:
        kind = "whole number" if self.whole else "number"
        what = f"a list, each a {kind}" if self.many else f"a {kind}"
        if math.isinf(self.greatest):
            return f"{what} of {self.least} or more"
        return f"{what} from {self.least} to {'below ' if self.below else ''}{self.greatest}"

    def holds(self, value: object) -> bool:
        """Whether a value of the configuration lies in the range."""
        if self.many:
            one = self._replace(many=False)
            return isinstance(value, list | tuple) and all(one.holds(entry) for entry in value)
        if isinstance(value, bool) or not isinstance(value, int if self.whole else int | float):
            return False
        if not math.isfinite(value):
            return False
        return self.least <= value < self.greatest if self.below else self.least <= value <= self.greatest


RANGES = {
    "seed": Range(0, 2**32 - 1, whole=True),
    "batch.per_device": Range(1, whole=True),
    "batch.effective": Range(1, whole=True),
    "trainer.max_steps": Range(1, whole=True),
    "trainer.val_every_steps": Range(1, whole=True),
    "trainer.log_every_steps": Range(1, whole=True),
    "trainer.checkpoint_every_steps": Range(1, whole=True),
    "trainer.gradient_clip": Range(0),
    "trainer.ema_decay": Range(0, 1, below=True),
    "optimizer.weight_decay": Range(0),
    "optimizer.betas": Range(0, 1, below=True, many=True),
    "optimizer.momentum": Range(0, 1, below=True),
    "optimizer.layer_decay": Range(0, 1),
    "schedule.warmup_steps": Range(0, whole=True),
    "schedule.final_ratio": Range(0, 1),
    "schedule.power": Range(0),
    "model.encoder.drop_path": Range(0, 1, below=True),
    "model.encoder.dropout": Range(0, 1, below=True),
    "model.decoder.channels": Range(1, whole=True, many=True),
}


def check_ranges(config: Mapping[str, Any]) -> None:
    """Refuse numbers that no run could use; those of a group that was not chosen are not looked for.

    Raises:
        UserError: names the key, its value and what it may be.
    """
    for key, allowed in RANGES.items():
        value: Any = config
        for part in key.split("."):
            if not isinstance(value, Mapping) or part not in value:
                break
            value = value[part]
        else:
            if not allowed.holds(value):
                raise UserError(f"{key}={'null' if value is None else value}: give {allowed}")
