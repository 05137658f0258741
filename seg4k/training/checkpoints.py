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
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from seg4k.errors import UserError
from seg4k.files import atomic_path
from seg4k.training.interruption import Interruption
from seg4k.training.module import SegmentationModule
from seg4k.training.weights import PREFIX, read_checkpoint

logger = logging.getLogger(__name__)

FOLDER = "checkpoints"
KEPT = 2
LEFT = "left_"  # before the names of those that a run went on without
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

# What may differ between a run and the one that goes on with it without changing the result beyond rounding.
_FREE = ("resume", "name", "logger", "sweep", "speed", "activation_checkpointing", "compile", "device")
# What may not: weights or optimizer state of the one would not fit the other.
_FIXED = ("optimizer.name", "model.encoder.name", "model.encoder.frozen", "model.decoder", "model.head")


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
        beyond = [path for path in step_checkpoints(self.folder) if _step_of(path) > step]
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


def find_checkpoint(config: Mapping[str, Any], directory: Path) -> tuple[Path, dict[str, Any]] | None:
    """The checkpoint to go on from, and its content; None to begin at step 0.

    Args:
        config: the whole configuration; `resume` is `none`, `auto` (the newest that is whole in the run
            directory, if any) or the path of a checkpoint.
        directory: the run directory.

    Raises:
        UserError: the named file cannot be read; with `none`, the directory holds those of an unfinished run;
            with `auto`, all that it holds are damaged; it is of another model or optimizer.
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
        _look_at_differences(content["seg4k"]["config"], config, path)
        return path, content
    last = folder / "last.ckpt"
    complete = _whole(last) if last.is_file() else None
    steps = {path: _step_of(path) for path in unfinished}
    if complete is not None:
        steps = {last: complete["global_step"], **steps}
    # By their steps: a run that was complete may have been given more of them, and begun to do them.
    for path in sorted(steps, key=steps.__getitem__, reverse=True):
        whole = complete if path == last else _whole(path)
        if whole is not None:
            _look_at_differences(whole["seg4k"]["config"], config, path)
            return path, whole
    if unfinished or last.is_file():
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


def _whole(path: Path) -> dict[str, Any] | None:
    """The content of a checkpoint; None, with a warning, where it is damaged."""
    try:
        _check_whole(path)
        return read_checkpoint(path)
    except (UserError, OSError, zipfile.BadZipFile) as error:
        logger.warning("%s is damaged and passed over for the one before (%s)", path, error)
        return None


def _step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step_"))


def _step_inside(path: Path) -> float:
    """The step of a checkpoint by what it holds; beyond all others where it cannot be read."""
    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        return int(content["global_step"])
    except Exception:  # unpickling has errors of many kinds
        return math.inf


def _check_whole(path: Path) -> None:
    """Compare every part of a checkpoint with its checksum; torch's own reader looks at lengths only."""
    with zipfile.ZipFile(path) as archive:
        broken = archive.testzip()
    if broken is not None:
        raise zipfile.BadZipFile(f"checksum of {broken}")


def _look_at_differences(before: Mapping[str, Any], now: Mapping[str, Any], path: Path) -> None:
    """Warn of settings that change the result.

    Raises:
        UserError: of those that what the checkpoint holds would not fit.
    """
    for key in _FIXED:
        there, here = _nested(before, key), _nested(now, key)
        if there is not None and here is not None and there != here:
            raise UserError(
                f"{path} was trained with {_as_overrides(key, there)}, and this run has "
                f"{_as_overrides(key, here)}: its weights or the state of its optimizer "
                "do not fit. Set it to what it was to go on, or begin anew with resume=none and another "
                "hydra.run.dir"
            )
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


def check_fits(model: nn.Module, content: Mapping[str, Any], path: Path) -> None:
    """Refuse to go on from weights of other shapes.

    Args:
        model: the segmenter of this run.
        content: of the checkpoint.
        path: of the checkpoint, for the message.

    Raises:
        UserError: naming the first that does not fit, and what shapes depend on.
    """
    saved = content["state_dict"]
    for name, value in model.state_dict().items():
        there = saved.get(PREFIX + name, value)
        if there.shape != value.shape:
            raise UserError(
                f"{path}: {name} is {tuple(there.shape)} there and {tuple(value.shape)} in this run. "
                "Give the number of classes (data), data.image_size and the channels of the images as they "
                "were to go on, or begin anew with resume=none and another hydra.run.dir"
            )


def _nested(config: Mapping[str, Any], key: str) -> Any:  # noqa: ANN401 - any plain value
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _as_overrides(key: str, value: Any) -> str:  # noqa: ANN401 - any plain value
    if isinstance(value, Mapping):
        return " ".join(_as_overrides(f"{key}.{name}", entry) for name, entry in value.items())
    return f"{key}={value}".replace(" ", "")


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
