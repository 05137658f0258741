"""Checkpoints that survive: written atomically, the two newest kept, damaged ones passed over.

`checkpoints/step_NNNNNNNN.ckpt` are written every `trainer.checkpoint_every_steps` optimizer steps, before
each validation and when the run is told to end; each holds all that training needs to go on to the bit.
`best.ckpt` is the one with the best validation mIoU so far, `last.ckpt` the one of the last step, once the
run is complete. A run that goes on from an older one renames what lies beyond it to `left_...`, until it is
complete itself.
"""

import errno
import logging
import math
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import Callback, LightningModule, Trainer

from seg4k.errors import UserError
from seg4k.files import atomic_path
from seg4k.training.interruption import Interruption
from seg4k.training.module import SegmentationModule

logger = logging.getLogger(__name__)

FOLDER = "checkpoints"
KEPT = 2
LEFT = "left_"  # before the names of those that a run went on without
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class AtomicCheckpointIO(TorchCheckpointIO):
    """A reader sees the old file or the whole new one, whenever the process is killed."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any = None) -> None:  # noqa: ANN401
        """Write a checkpoint.

        Raises:
            UserError: the disk is full. What was there before is intact.
        """
        try:
            with atomic_path(Path(path)) as temporary, temporary.open("wb") as file:
                torch.save(checkpoint, file)
        except (OSError, RuntimeError) as error:
            if disk_is_full(error):
                raise UserError(
                    f"no space left on the disk of {Path(path).parent} for a checkpoint ({error}). The last "
                    "one is intact: make room, and go on with resume=auto."
                ) from error
            raise


class Checkpoints(Callback):
    """Writes checkpoints at the end of optimizer steps, and ends the run there when it is told to.

    Give it to the Trainer after all callbacks that hold something, so that it saves what they hold after the
    step.

    Args:
        directory: the run directory.
        every_steps: optimizer steps between two checkpoints.
        val_every_steps: optimizer steps between two validations.
        max_steps: the last step.
        interruption: knows whether the run was told to end.
    """

    def __init__(
        self,
        directory: Path,
        *,
        every_steps: int,
        val_every_steps: int,
        max_steps: int,
        interruption: Interruption,
    ) -> None:
        self.folder = directory / FOLDER
        self.every_steps = every_steps
        self.val_every_steps = val_every_steps
        self.max_steps = max_steps
        self.interruption = interruption
        self.best: float | None = None
        self.resumed_step: int | None = None

    def state_dict(self) -> dict[str, Any]:
        """The best score so far."""
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from the best score so far."""
        self.best = state_dict["best"]

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Make up for a validation that was due at the step of the checkpoint."""
        if trainer.is_global_zero:
            for path in self.folder.glob(".*.ckpt*"):  # half written when the run was killed
                path.unlink(missing_ok=True)
            if self.resumed_step is not None:
                self._leave_those_beyond(self.resumed_step)
        step = trainer.global_step
        if self.resumed_step is None or step == 0 or step % self.val_every_steps or step >= self.max_steps:
            return
        loop = trainer.fit_loop.epoch_loop.val_loop
        trainer.validating = True
        loop.restarting = False
        loop.run()
        trainer.training = True

    def on_train_batch_end(
        self,
        trainer: Trainer,
        module: LightningModule,
        outputs: Any,  # noqa: ANN401
        batch: Any,  # noqa: ANN401
        batch_idx: int,
    ) -> None:
        """Save where it is due."""
        if trainer.fit_loop._should_accumulate():
            return
        assert isinstance(module, SegmentationModule)
        step = trainer.global_step
        due = step % self.every_steps == 0 or step % self.val_every_steps == 0 or step >= self.max_steps
        if due or module.stop_agreed:
            trainer.save_checkpoint(self._path(step), weights_only=False)
            if trainer.is_global_zero:
                self._prune()
        if module.stop_agreed:
            raise self.interruption.ending(f"after optimizer step {step}, whose checkpoint is written")

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Keep the checkpoint that was looked at, if it is the best so far."""
        assert isinstance(module, SegmentationModule)
        score = module.scores["val_miou"]
        if not math.isfinite(score) or (self.best is not None and score <= self.best):
            return
        self.best = score
        source = self._path(trainer.global_step)
        if trainer.is_global_zero and source.is_file():
            _link(source, self.folder / "best.ckpt")

    def finish(self, step: int) -> None:
        """Name the checkpoint of the last step `last.ckpt` and remove the others; in one process only."""
        if self._path(step).is_file():
            self._path(step).replace(self.folder / "last.ckpt")
        for path in [*step_checkpoints(self.folder), *self.folder.glob(f"{LEFT}*.ckpt")]:
            path.unlink()

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}.ckpt"

    def _leave_those_beyond(self, step: int) -> None:
        """Rename checkpoints of later steps: those that this run writes are its newest."""
        last = self.folder / "last.ckpt"
        beyond = [path for path in step_checkpoints(self.folder) if step_of(path) > step]
        if last.is_file() and _step_inside(last) > step:
            beyond.append(last)
        for path in beyond:
            path.replace(path.with_name(f"{LEFT}{path.name}"))
            logger.warning(
                "%s lies beyond step %d, from which the run goes on: renamed to %s%s, to be removed when the "
                "run is complete",
                path,
                step,
                LEFT,
                path.name,
            )

    def _prune(self) -> None:
        for path in step_checkpoints(self.folder)[KEPT:]:
            path.unlink(missing_ok=True)


def step_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of single steps, the newest first."""
    return sorted(folder.glob(f"step_{'[0-9]' * 8}.ckpt"), reverse=True)


def step_of(path: Path) -> int:
    """The step of a checkpoint by its name."""
    return int(path.stem.removeprefix("step_"))


def _step_inside(path: Path) -> float:
    """The step of a checkpoint by what it holds; beyond all others where it cannot be read."""
    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        return int(content["global_step"])
    except Exception:  # unpickling has errors of many kinds
        return math.inf


def disk_is_full(error: BaseException | None) -> bool:
    """Whether an error is, or came of, a write that found no space left."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        error = error.__cause__ or error.__context__
    return False


def _link(source: Path, target: Path) -> None:
    """Make `target` the same file as `source`, or a copy of it where the file system has no links."""
    temporary = target.with_name(f".{target.name}.link")
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
        temporary.replace(target)
    except OSError:
        with atomic_path(target) as copy:
            shutil.copyfile(source, copy)
