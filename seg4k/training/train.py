"""One training run, from a plain configuration to a run card."""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.utilities import rank_zero_only

from seg4k.activation_checkpointing import AppliedPlan, Plan, apply_activation_checkpointing, make_plan
from seg4k.data.build import build_datamodule
from seg4k.data.datamodule import SegmentationDataModule
from seg4k.errors import UserError
from seg4k.losses.build import build_loss, strip_options
from seg4k.models.vit_unet import ViTUNet, build_model
from seg4k.training.agreement import decided_by_the_first, of_every_process
from seg4k.training.callbacks import MemoryWatch, ProgressBar, ProgressLines, Stopwatch, largest_peak
from seg4k.training.checkpoints import (
    AtomicCheckpointIO,
    Checkpoints,
    check_run_directory,
    find_checkpoint,
)
from seg4k.training.compilation import compile_segments
from seg4k.training.interruption import Interruption
from seg4k.training.launch import WORLD_VARIABLES, Job, Launcher
from seg4k.training.loggers import build_loggers, log_artifacts
from seg4k.training.module import ON_NAN, SegmentationModule
from seg4k.training.out_of_memory import after_out_of_memory
from seg4k.training.pictures import draw_samples
from seg4k.training.planning import Task, before_training, is_predicted
from seg4k.training.quiet import quiet
from seg4k.training.run_card import PRECISIONS, blank_card, device_state, ending, finite, write_card
from seg4k.training.sharding import ShardedSegmentationModule
from seg4k.training.strategies import (
    build_strategy,
    check_strategy,
    cluster,
    connect_early,
    uses_gpu,
    world_size,
)
from seg4k.training.summary import print_summary
from seg4k.training.weights import describe

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
        write_card(directory, card)
        print(f"seg4k: {reason}", file=sys.stderr, flush=True)
        os._exit(1)

    job = Job(dict(config), str(directory), command, preflight, lost)
    trainer: Trainer | None = None
    variables = {name: os.environ.get(name) for name in WORLD_VARIABLES}
    failed = True
    try:
        with Interruption() as interruption:
            check_strategy(config)
            found = find_checkpoint(config, directory)
            if found is None:
                check_run_directory(config, directory)
            elif (before := _completed(config, directory, found[1])) is not None:
                print(f"complete before, nothing to do: {directory}", flush=True)
                card, failed = before, False
                return before
            trainer, module, data = _prepare(config, directory, card, job, interruption, found)
            _fit(trainer, module, data, directory, card, found)
            card["status"] = "completed"
            failed = False
    except BaseException as error:
        card["status"], card["error"] = ending(error)
        if isinstance(error, Exception) and (reason := _lost(trainer)) is not None:
            card["error"] = f"{reason}; here: {card['error']}"
        if card["status"] == "out_of_memory" and first:
            advice = after_out_of_memory(config, card)
            card["error"] = f"{card['error']} {advice}"
            print(f"seg4k: {advice}", file=sys.stderr, flush=True)
        raise
    finally:
        if first:
            write_card(directory, card)
        _end_processes(trainer, variables, failed=failed)
    if trainer.is_global_zero:
        log_artifacts(trainer.loggers, directory)
        print_summary(card, module.classes, directory)
    return finite(card)  # type: ignore[no-any-return]


def accumulation(config: Mapping[str, Any], world_size: int) -> int:
    """Forward passes per optimizer step, from batch.effective and batch.per_device.

    Raises:
        UserError: where they do not divide.
    """
    per_device, effective = config["batch"]["per_device"], config["batch"]["effective"]
    if per_device < 1 or effective < 1:
        raise UserError(f"batch.per_device={per_device}, batch.effective={effective}: both must be 1 or more")
    at_once = per_device * world_size
    if effective % at_once:
        raise UserError(
            f"batch.effective={effective} is not a multiple of batch.per_device={per_device} x {world_size} "
            f"device(s); set batch.effective={at_once * max(1, effective // at_once)}"
        )
    return int(effective // at_once)


Found = tuple[Path, dict[str, Any]]


def _prepare(
    config: Mapping[str, Any],
    directory: Path,
    card: dict[str, Any],
    job: Job,
    interruption: Interruption,
    found: Found | None,
) -> tuple[Trainer, SegmentationModule, SegmentationDataModule]:
    """Build everything. Order: activation checkpointing, then compile, then (in `fit`) DDP or FSDP."""
    settings = config["trainer"]
    if config["precision"] not in PRECISIONS:
        raise UserError(f"precision={config['precision']}: choose one of {', '.join(PRECISIONS)}")
    if config["precision"] == "fp16" and not uses_gpu(settings["accelerator"]):
        raise UserError("precision=fp16 needs a GPU for its gradient scaler; set precision=bf16 or fp32")
    for key in ("max_steps", "val_every_steps", "log_every_steps", "checkpoint_every_steps"):
        if settings[key] < 1:
            raise UserError(f"trainer.{key}={settings[key]}: must be 1 or more")
    if settings["on_nan"] not in ON_NAN:
        raise UserError(f"trainer.on_nan={settings['on_nan']}: choose {' or '.join(ON_NAN)}")
    accumulate = accumulation(config, world_size(settings))
    check_strategy(config, accumulate)
    card["batch"]["accumulate"] = accumulate
    # Seeds every library, workers too; 0 is a seed like any other.
    seed_everything(config["seed"], workers=True, verbose=False)

    os.environ.setdefault("LOCAL_WORLD_SIZE", str(settings["devices"]))  # cores are shared by the processes
    data = build_datamodule(
        config["data"], seed=config["seed"], batch_size=config["batch"]["per_device"], accumulate=accumulate
    )
    data.prepare_data()
    classes = data.class_table
    resumed_step = found[1]["global_step"] if found is not None else None
    card["faults"]["resumed_from_step"] = resumed_step
    stopwatch = Stopwatch(config["batch"]["effective"])
    memory = MemoryWatch(stopwatch, settings["max_steps"])
    checkpoints = Checkpoints(
        directory,
        every_steps=settings["checkpoint_every_steps"],
        val_every_steps=settings["val_every_steps"],
        max_steps=settings["max_steps"],
        interruption=interruption,
    )
    checkpoints.resumed_step = resumed_step
    trainer = _trainer(config, directory, job, accumulate, (stopwatch, memory, interruption, checkpoints))
    if is_predicted(config) and job.preflight is None:
        task = Task(len(classes), data.in_channels, classes.ignore_index)
        job.preflight = decided_by_the_first(
            lambda: before_training(config, task), connected=connect_early(trainer.strategy)
        )
    if job.preflight is not None:
        card["memory"]["predicted_peak_bytes"] = job.preflight["predicted_peak_bytes"]
    data.setup("fit")
    image_size = tuple(config["data"]["image_size"])
    model = build_model(
        config["model"], num_classes=len(classes), image_size=image_size, in_channels=data.in_channels
    )
    if config["precision"] == "fp64":
        model.double()  # before it is sharded; the other precisions keep fp32 weights
    if config["strategy"].get("sync_batchnorm"):
        torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    plan = None if job.preflight is None else Plan(job.preflight["plan"])
    card["activation_checkpointing"], applied = _apply_plan(
        config["activation_checkpointing"], model, plan, compiled=config["compile"]
    )
    if config["compile"]:
        compile_segments(model, applied)
    sharded = config["strategy"]["name"] == "fsdp"
    module = (ShardedSegmentationModule if sharded else SegmentationModule)(
        model,
        build_loss(config["loss"], len(classes), classes.ignore_index),
        classes,
        strips=strip_options(config["loss"]),
        optimizer=config["optimizer"],
        schedule=config["schedule"],
        description=describe(model, classes, config),
        seed=config["seed"],
        gradient_clip=settings["gradient_clip"],
        on_nan=settings["on_nan"],
        log_every_steps=settings["log_every_steps"],
    )
    module.stop_requested = interruption.requested
    if isinstance(module, ShardedSegmentationModule):
        module.sharding = config["strategy"]

    card["device"] = device_state(module.device.type, None, trainer.world_size)
    card["strategy"] = config["strategy"]["name"]
    return trainer, module, data


def _fit(
    trainer: Trainer,
    module: SegmentationModule,
    data: SegmentationDataModule,
    directory: Path,
    card: dict[str, Any],
    found: Found | None,
) -> None:
    """Train, validate and draw; the card is filled however it ends."""
    checkpoints = _only(trainer, Checkpoints)
    stopwatch, memory = _only(trainer, Stopwatch), _only(trainer, MemoryWatch)
    path = None if found is None else found[0]
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
    if trainer.interrupted:
        raise KeyboardInterrupt
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


def _lost(trainer: Trainer | None) -> str | None:
    """What is known of another process that failed."""
    launcher = trainer.strategy.launcher if trainer is not None else None
    return launcher.failure() if isinstance(launcher, Launcher) else None


def _end_processes(trainer: Trainer | None, variables: Mapping[str, str | None], *, failed: bool) -> None:
    """End the other processes of the run, and leave none of its traces in this one."""
    launcher = trainer.strategy.launcher if trainer is not None else None
    if isinstance(launcher, Launcher):
        launcher.end(failed=failed)
        # NCCL may wait here for ever for a process that is no more; gloo sees that it is gone.
        if torch.distributed.is_initialized() and (not failed or torch.distributed.get_backend() == "gloo"):
            torch.distributed.destroy_process_group()
    for name, value in variables.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def _apply_plan(
    config: Mapping[str, Any], model: ViTUNet, plan: Plan | None, *, compiled: bool
) -> tuple[dict[str, Any], AppliedPlan]:
    """Apply the plan that was predicted, or else the configured one, and describe it for the card."""
    if plan is None:
        options = {key: value for key, value in config.items() if key not in ("mode", "budget", "audit")}
        plan = make_plan(config["mode"], list(model.segments()), **options)
    # The audit watches operation by operation, and compiled code has none to watch.
    applied = apply_activation_checkpointing(model, plan, audit="off" if compiled else config["audit"])
    segments = [{"name": name, "policy": str(policy)} for name, policy in plan.items()]
    return {"mode": config["mode"], "segments": segments}, applied


def _trainer(
    config: Mapping[str, Any],
    directory: Path,
    job: Job,
    accumulate: int,
    watches: tuple[Stopwatch, MemoryWatch, Interruption, Checkpoints],
) -> Trainer:
    settings = config["trainer"]
    stopwatch, memory, interruption, checkpoints = watches
    on_terminal = sys.stdout.isatty()
    callbacks: list[Callback] = [
        interruption,
        stopwatch,
        memory,
        ProgressBar(stopwatch, memory)
        if on_terminal
        else ProgressLines(stopwatch, memory, settings["log_every_steps"]),
    ]
    if settings["ema_decay"] > 0:
        callbacks.append(EMAWeightAveraging(decay=settings["ema_decay"]))
    callbacks.append(checkpoints)
    return Trainer(
        max_steps=settings["max_steps"],
        max_epochs=-1,
        accelerator=settings["accelerator"],
        devices=settings["devices"],
        num_nodes=settings["num_nodes"],
        strategy=build_strategy(config, job),
        plugins=[AtomicCheckpointIO(), *cluster()],
        # In fp64 the model is so already; Lightning would refuse to shard it.
        precision="32-true" if config["precision"] == "fp64" else PRECISIONS[config["precision"]],  # type: ignore[arg-type]
        accumulate_grad_batches=accumulate,
        val_check_interval=settings["val_every_steps"] * accumulate,
        check_val_every_n_epoch=None,
        log_every_n_steps=settings["log_every_steps"],
        num_sanity_val_steps=0,
        use_distributed_sampler=False,  # the data module shards by itself
        deterministic=settings["deterministic"],
        default_root_dir=directory,
        logger=build_loggers(
            config["logger"], directory, config["name"], resumed_step=checkpoints.resumed_step
        ),
        callbacks=callbacks,
        enable_checkpointing=False,  # Lightning's own
        enable_progress_bar=on_terminal,
        enable_model_summary=False,
    )


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
