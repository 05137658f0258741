"""What a training run is made of, put together from a plain configuration: data, model, plan, trainer."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.utilities.seed import isolate_rng

from seg4k.activation_checkpointing import AppliedPlan, Plan, apply_activation_checkpointing, make_plan
from seg4k.data.build import build_datamodule
from seg4k.data.datamodule import SegmentationDataModule
from seg4k.errors import UserError
from seg4k.losses.build import build_loss, strip_options
from seg4k.models.vit_unet import ViTUNet, build_model
from seg4k.training.agreement import decided_by_the_first
from seg4k.training.callbacks import MemoryWatch, ProgressBar, ProgressLines, Stopwatch, WaitBegins
from seg4k.training.checkpoints import AtomicCheckpointIO, Checkpoints
from seg4k.training.compilation import compile_segments
from seg4k.training.interruption import Interruption
from seg4k.training.launch import Job
from seg4k.training.loggers import build_loggers
from seg4k.training.module import ON_NAN, SegmentationModule
from seg4k.training.planning import Task, before_training, is_predicted
from seg4k.training.resume import check_fits
from seg4k.training.run_card import PRECISIONS, device_state
from seg4k.training.sharding import ShardedSegmentationModule
from seg4k.training.strategies import (
    build_strategy,
    check_strategy,
    cluster,
    connect_early,
    uses_gpu,
    world_size,
)
from seg4k.training.weights import describe

Found = tuple[Path, dict[str, Any]]
"""A checkpoint to go on from, and what it holds."""


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


def prepare(
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
    stopwatch = Stopwatch(config["batch"]["effective"], resumed_step or 0)
    memory = MemoryWatch(stopwatch, settings["max_steps"], resumed_step or 0)
    checkpoints = Checkpoints(
        directory,
        every_steps=settings["checkpoint_every_steps"],
        val_every_steps=settings["val_every_steps"],
        max_steps=settings["max_steps"],
        interruption=interruption,
    )
    checkpoints.resumed_step = resumed_step
    trainer = make_trainer(config, directory, job, accumulate, (stopwatch, memory, interruption, checkpoints))
    if is_predicted(config) and job.preflight is None:
        task = Task(len(classes), data.in_channels, classes.ignore_index)
        with isolate_rng():  # a run that plans draws the same numbers as one that does not
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
    if found is not None:
        check_fits(model, found[1], found[0])
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


def make_trainer(
    config: Mapping[str, Any],
    directory: Path,
    job: Job,
    accumulate: int,
    watches: tuple[Stopwatch, MemoryWatch, Interruption, Checkpoints],
) -> Trainer:
    """Lightning's trainer with the callbacks, loggers and strategy of the configuration."""
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
    callbacks += [checkpoints, WaitBegins(stopwatch)]
    return Trainer(
        max_steps=settings["max_steps"],
        max_epochs=-1,
        # Lightning's auto takes other devices too, such as Apple's, for which nothing here is made.
        accelerator="cuda" if uses_gpu(settings["accelerator"]) else "cpu",
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
