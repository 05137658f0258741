"""One training run, from a plain configuration to a run card."""

import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities import rank_zero_only

from seg4k.data.datamodule import SegmentationDataModule
from seg4k.errors import UserError
from seg4k.training.agreement import leave_process_group, of_every_process
from seg4k.training.assembly import prepare
from seg4k.training.callbacks import MemoryWatch, Stopwatch, largest_peak
from seg4k.training.checkpoints import Checkpoints, disk_is_full
from seg4k.training.interruption import Interruption
from seg4k.training.launch import WORLD_VARIABLES, Job, Launcher
from seg4k.training.loggers import log_artifacts
from seg4k.training.module import SegmentationModule
from seg4k.training.out_of_memory import after_out_of_memory
from seg4k.training.pictures import draw_samples
from seg4k.training.quiet import quiet
from seg4k.training.ranges import check_ranges
from seg4k.training.resume import check_run_directory, find_checkpoint
from seg4k.training.run_card import blank_card, device_state, ending, finite, write_card
from seg4k.training.sharding import ShardedSegmentationModule
from seg4k.training.strategies import check_strategy
from seg4k.training.summary import print_summary

PICTURES = 4

CallbackKind = TypeVar("CallbackKind", bound=Callback)


def train(
    config: Mapping[str, Any], directory: Path, command: str, *, preflight: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Train, validate, and write everything into `directory`; the run card however it ends.

    Args:
        config: the whole configuration as plain dicts, lists and values.
        directory: the run directory.
        command: the command as it was typed, for the card.
        preflight: in a further process, what the first one found; see `planning.before_training`.

    Returns:
        The run card.

    Raises:
        UserError: a mistake in the configuration or the data.
    """
    quiet()
    card = blank_card(config, command)
    first = getattr(rank_zero_only, "rank", 0) == 0

    def lost(reason: str) -> None:
        # This process hangs in an exchange with one that is no more, and nothing but its end ends that.
        card["status"], card["error"] = "failed", reason
        _try_to_write_card(directory, card)
        print(f"seg4k: {reason}", file=sys.stderr, flush=True)
        os._exit(1)

    job = Job(dict(config), str(directory), command, preflight, lost)
    trainer: Trainer | None = None
    variables = {name: os.environ.get(name) for name in WORLD_VARIABLES}
    failed = True
    interruption = Interruption()
    try:
        with interruption, _full_disk_told_once():
            check_ranges(config)
            check_strategy(config)
            found = find_checkpoint(config, directory)
            if found is None:
                check_run_directory(config, directory)
            elif (before := _completed(config, directory, found[1])) is not None:
                print(f"complete before, nothing to do: {directory}", flush=True)
                card, failed = before, False
                return before
            trainer, module, data = prepare(config, directory, card, job, interruption, found)
            path = None if found is None else found[0]
            found = None  # what it holds would stay in memory; training reads the file again
            with interruption.ctrl_c():
                _fit(trainer, module, data, directory, card, path)
            card["status"] = "completed"
            failed = False
    except BaseException as original:
        error = _told(original, directory)
        card["status"], card["error"] = ending(error)
        if isinstance(error, Exception) and (reason := _lost(trainer, error)) is not None:
            card["error"] = f"{reason}; here: {card['error']}"
        if card["status"] == "out_of_memory" and first:
            advice = after_out_of_memory(config, card)
            card["error"] = f"{card['error']} {advice}"
            print(f"seg4k: {advice}", file=sys.stderr, flush=True)
        if error is not original:
            raise error from original
        raise
    finally:
        # Where the card cannot be written, what the run itself ended by goes on.
        unwritten = _try_to_write_card(directory, card) if first else None
        _end_processes(trainer, variables, failed=failed)
        interruption.allow_ctrl_c()
    if unwritten is not None:
        raise _told(unwritten, directory)
    if trainer.is_global_zero:
        log_artifacts(trainer.loggers, directory)
        print_summary(card, module.classes, directory)
    return finite(card)  # type: ignore[no-any-return]


def _told(error: BaseException, directory: Path) -> BaseException:
    """What to say of an error: of a full disk, wherever it was met, what to do; any other is itself."""
    if isinstance(error, UserError) or not isinstance(error, Exception) or not disk_is_full(error):
        return error
    return UserError(
        f"no space left on the disk of {directory} ({error}). Checkpoints that are written are intact: make "
        "room, and go on with resume=auto."
    )


@contextmanager
def _full_disk_told_once() -> Iterator[None]:
    """Leave out the traceback of a thread whose write found no space: TensorBoard hands it on to the run."""
    before = threading.excepthook

    def hook(thread: threading.ExceptHookArgs) -> None:
        if not disk_is_full(thread.exc_value):
            before(thread)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = before


def _try_to_write_card(directory: Path, card: Mapping[str, Any]) -> OSError | None:
    """Write the card; where that cannot be done, say so and give the reason."""
    try:
        write_card(directory, card)
    except OSError as error:
        print(f"seg4k: the run card in {directory} is not written: {error}", file=sys.stderr, flush=True)
        return error
    return None


def _fit(
    trainer: Trainer,
    module: SegmentationModule,
    data: SegmentationDataModule,
    directory: Path,
    card: dict[str, Any],
    path: Path | None,
) -> None:
    """Train, validate and draw; the card is filled however it ends."""
    checkpoints = _only(trainer, Checkpoints)
    stopwatch, memory = _only(trainer, Stopwatch), _only(trainer, MemoryWatch)
    try:
        trainer.fit(module, datamodule=data, ckpt_path=path, weights_only=True)
    finally:
        card["device"] = device_state(
            trainer.strategy.root_device.type, trainer.strategy.root_device.index, trainer.world_size
        )
        card["memory"] |= memory.figures()
        card["throughput"] = stopwatch.figures()
        card["metrics"] = _metrics(module)
        card["faults"]["skipped_steps"] = module.skipped_steps
    figures = of_every_process(memory.figures(), connected=trainer.world_size > 1)
    card["memory"] |= largest_peak(figures)
    if module.validated_step != trainer.global_step:
        trainer.validate(module, datamodule=data, verbose=False, weights_only=True)
        card["metrics"] = _metrics(module)
    if trainer.is_global_zero:
        checkpoints.finish(trainer.global_step)
    if trainer.is_global_zero or isinstance(module, ShardedSegmentationModule):
        _draw(trainer, module, data, directory / "val_samples.png", card["config"]["name"])


def _only(trainer: Trainer, kind: type[CallbackKind]) -> CallbackKind:
    return next(callback for callback in trainer.callbacks if isinstance(callback, kind))  # type: ignore[attr-defined]


def _completed(
    config: Mapping[str, Any], directory: Path, content: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The card of a run that `resume=auto` finds complete."""
    path = directory / "run_card.json"
    if (
        config["resume"] != "auto"
        or content["global_step"] < config["trainer"]["max_steps"]
        or not path.is_file()
    ):
        return None
    card: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return card if card["status"] == "completed" else None


def _lost(trainer: Trainer | None, error: Exception) -> str | None:
    """What is known of another process that failed, in view of the error in this one."""
    launcher = trainer.strategy.launcher if trainer is not None else None
    return launcher.failure(error) if isinstance(launcher, Launcher) else None


def _end_processes(trainer: Trainer | None, variables: Mapping[str, str | None], *, failed: bool) -> None:
    """End the other processes of the run, and leave none of its traces in this one."""
    launcher = trainer.strategy.launcher if trainer is not None else None
    if isinstance(launcher, Launcher):
        launcher.end(failed=failed)
        # NCCL may wait here for ever for a process that is no more; gloo sees that it is gone.
        if torch.distributed.is_initialized() and (not failed or torch.distributed.get_backend() == "gloo"):
            leave_process_group()
    for name, value in variables.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def _metrics(module: SegmentationModule) -> dict[str, Any]:
    """The last validation; None where there was none."""
    values = module.scores
    return {
        "val_miou": values.get("val_miou"),
        "val_iou": {
            name: values[f"val_iou/{name}"] for name in module.classes.names if f"val_iou/{name}" in values
        },
        "val_loss": values.get("val_loss"),
        "val_samples": module.counts.samples,
    }


@torch.no_grad()
def _draw(
    trainer: Trainer, module: SegmentationModule, data: SegmentationDataModule, path: Path, name: str
) -> None:
    module.eval()
    samples = data.sample_for_picture(PICTURES)
    predictions = []
    for sample in samples:
        with trainer.precision_plugin.forward_context():
            logits = module(sample["image"][None].to(module.device))
        predictions.append(logits.argmax(dim=1)[0].cpu())
    if not trainer.is_global_zero:
        return
    draw_samples(
        path,
        [sample["image"] for sample in samples],
        [sample["mask"] for sample in samples],
        predictions,
        module.classes,
        title=f"{name}: validation after {trainer.global_step} steps",
    )
