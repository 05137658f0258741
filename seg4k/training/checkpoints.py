"""Checkpoints that survive: written atomically, the two newest kept, damaged ones passed over.

`checkpoints/step_NNNNNNNN.ckpt` are written every `trainer.checkpoint_every_steps` optimizer steps, before
each validation and when the run is told to end; each holds all that training needs to go on to the bit.
`best.ckpt` is the one with the best validation mIoU so far, `last.ckpt` the one of the last step, once the
run is complete.
"""

import errno
import logging
import math
import os
import shutil
import zipfile
from collections.abc import Mapping
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
from seg4k.training.weights import read_checkpoint

logger = logging.getLogger(__name__)

FOLDER = "checkpoints"
KEPT = 2
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

# What may differ between a run and the one that goes on with it without changing the result beyond rounding.
_FREE = ("resume", "name", "logger", "sweep", "speed", "activation_checkpointing", "compile", "device")


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

    Give it to the Trainer as the last callback, so that it saves what the others hold after the step.

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
        for path in step_checkpoints(self.folder):
            path.unlink()

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}.ckpt"

    def _prune(self) -> None:
        for path in step_checkpoints(self.folder)[KEPT:]:
            path.unlink(missing_ok=True)


def step_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of single steps, the newest first."""
    return sorted(folder.glob("step_*.ckpt"), reverse=True)


def find_checkpoint(config: Mapping[str, Any], directory: Path) -> tuple[Path, dict[str, Any]] | None:
    """The checkpoint to go on from, and its content; None to begin at step 0.

    Args:
        config: the whole configuration; `resume` is `none`, `auto` (the newest that is whole in the run
            directory, if any) or the path of a checkpoint.
        directory: the run directory.

    Raises:
        UserError: the named file cannot be read; with `none`, the directory holds those of an unfinished run;
            with `auto`, all that it holds are damaged.
    """
    resume, folder = str(config["resume"]), directory / FOLDER
    unfinished = step_checkpoints(folder)
    if resume == "none":
        if unfinished:
            raise UserError(
                f"{folder} holds checkpoints of an unfinished run, up to {unfinished[0].stem}: go on with "
                "resume=auto, or remove them, or give another hydra.run.dir"
            )
        return None
    if resume != "auto":
        path = Path(resume)
        content = read_checkpoint(path)
        if "optimizer_states" not in content:
            raise UserError(f"resume={path}: holds weights only; use it as model weights, not to go on from")
        _warn_of_differences(content["seg4k"]["config"], config, path)
        return path, content
    for path in [*folder.glob("last.ckpt"), *unfinished]:
        try:
            _check_whole(path)
            content = read_checkpoint(path)
        except (UserError, OSError, zipfile.BadZipFile) as error:
            logger.warning("%s is damaged and passed over for the one before (%s)", path, error)
            continue
        _warn_of_differences(content["seg4k"]["config"], config, path)
        return path, content
    if unfinished:
        raise UserError(f"resume=auto: every checkpoint in {folder} is damaged; remove them to begin anew")
    return None


def check_run_directory(config: Mapping[str, Any], directory: Path) -> None:
    """Refuse `resume=auto` in a directory that no second start will find again.

    Raises:
        UserError: its name is the time of the start, and nothing is in it to go on from.
    """
    stamp = directory.name.replace("_", "-").split("-")
    if config["resume"] == "auto" and len(stamp) == 6 and all(part.isdigit() for part in stamp):
        raise UserError(
            f"resume=auto: the run directory {directory} has the time of this start as its name, so the next "
            "start would not find it; give one, such as hydra.run.dir=outputs/my_run, with each start"
        )


def _check_whole(path: Path) -> None:
    """Compare every part of a checkpoint with its checksum; torch's own reader looks at lengths only."""
    with zipfile.ZipFile(path) as archive:
        broken = archive.testzip()
    if broken is not None:
        raise zipfile.BadZipFile(f"checksum of {broken}")


def _warn_of_differences(before: Mapping[str, Any], now: Mapping[str, Any], path: Path) -> None:
    differing = sorted(
        f"{group}.{key}" if isinstance(now.get(group), Mapping) else group
        for group in {*before, *now} - set(_FREE)
        for key in ({*before.get(group, {}), *now[group]} if isinstance(now.get(group), Mapping) else {None})
        if _entry(before, group, key) != _entry(now, group, key)
    )
    if differing:
        logger.warning(
            "going on from %s, which was trained with other values of %s: the result is not that of an "
            "unbroken run",
            path,
            ", ".join(differing),
        )


def _entry(config: Mapping[str, Any], group: str, key: str | None) -> Any:  # noqa: ANN401 - any plain value
    value = config.get(group)
    return value.get(key) if isinstance(value, Mapping) and key is not None else value


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
