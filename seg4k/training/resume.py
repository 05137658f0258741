"""From where a run goes on: the newest whole checkpoint, if what it was trained with fits this run."""

import logging
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from seg4k.errors import UserError
from seg4k.training.checkpoints import FOLDER, step_checkpoints, step_of
from seg4k.training.weights import PREFIX, read_checkpoint

logger = logging.getLogger(__name__)

# What may differ between a run and the one that goes on with it without changing the result beyond rounding.
_FREE = ("resume", "name", "logger", "sweep", "speed", "activation_checkpointing", "compile", "device")
# What may not: weights or optimizer state of the one would not fit the other.
_FIXED = ("optimizer.name", "model.encoder.name", "model.encoder.frozen", "model.decoder", "model.head")


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
    steps = {path: step_of(path) for path in unfinished}
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
