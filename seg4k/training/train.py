"""One training run, from a plain configuration to a run card."""

import logging
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_only

from seg4k.activation_checkpointing import apply_activation_checkpointing, make_plan
from seg4k.data.build import build_datamodule
from seg4k.data.datamodule import SegmentationDataModule
from seg4k.errors import UserError
from seg4k.losses.build import build_loss, strip_options
from seg4k.models.vit_unet import build_model
from seg4k.training.callbacks import MemoryWatch, ProgressBar, ProgressLines, Stopwatch
from seg4k.training.loggers import build_loggers, log_artifacts
from seg4k.training.module import ON_NAN, SegmentationModule
from seg4k.training.pictures import draw_samples
from seg4k.training.run_card import (
    SCHEMA,
    code_state,
    device_state,
    environment,
    finite,
    write_card,
)
from seg4k.training.summary import print_summary
from seg4k.training.weights import describe

PRECISIONS = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
PICTURES = 4


def train(config: Mapping[str, Any], directory: Path, command: str) -> dict[str, Any]:
    """Train, validate, and write everything into `directory`; the run card however it ends.

    Args:
        config: the whole configuration as plain dicts, lists and values.
        directory: the run directory.
        command: the command as it was typed, for the card.

    Returns:
        The run card.

    Raises:
        UserError: a mistake in the configuration or the data.
    """
    _quiet()
    card = _blank_card(config, command)
    try:
        trainer = _run(config, directory, card)
        card["status"] = "completed"
    except BaseException as error:
        card["status"], card["error"] = _ending(error)
        raise
    finally:
        if getattr(rank_zero_only, "rank", 0) == 0:
            write_card(directory, card)
    if trainer.is_global_zero:
        log_artifacts(trainer.loggers, directory)
        assert isinstance(trainer.lightning_module, SegmentationModule)
        print_summary(card, trainer.lightning_module.classes, directory)
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


def _run(config: Mapping[str, Any], directory: Path, card: dict[str, Any]) -> Trainer:
    settings = config["trainer"]
    if config["precision"] not in PRECISIONS:
        raise UserError(f"precision={config['precision']}: choose one of {', '.join(PRECISIONS)}")
    if settings["max_steps"] < 1 or settings["val_every_steps"] < 1 or settings["log_every_steps"] < 1:
        raise UserError(
            "trainer.max_steps, trainer.val_every_steps and trainer.log_every_steps must be 1 or more"
        )
    if settings["on_nan"] not in ON_NAN:
        raise UserError(f"trainer.on_nan={settings['on_nan']}: choose {' or '.join(ON_NAN)}")
    accumulate = accumulation(config, settings["devices"])
    card["batch"]["accumulate"] = accumulate
    # Seeds every library, workers too; 0 is a seed like any other.
    seed_everything(config["seed"], workers=True, verbose=False)

    data = build_datamodule(
        config["data"], seed=config["seed"], batch_size=config["batch"]["per_device"], accumulate=accumulate
    )
    data.prepare_data()
    data.setup("fit")
    classes = data.class_table
    image_size = tuple(config["data"]["image_size"])
    model = build_model(
        config["model"], num_classes=len(classes), image_size=image_size, in_channels=data.in_channels
    )
    plan = _apply_plan(config["activation_checkpointing"], model)
    card["activation_checkpointing"] = plan
    module = SegmentationModule(
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

    stopwatch = Stopwatch(config["batch"]["effective"])
    memory = MemoryWatch(stopwatch, settings["max_steps"])
    trainer = _trainer(config, directory, accumulate, [stopwatch, memory])
    card["device"] = device_state(module.device.type, None, trainer.world_size)
    card["strategy"] = type(trainer.strategy).__name__
    try:
        trainer.fit(module, datamodule=data, weights_only=True)
    finally:
        reading = memory.reading()
        card["device"] = device_state(
            trainer.strategy.root_device.type, trainer.strategy.root_device.index, trainer.world_size
        )
        card["memory"] |= {
            "peak_bytes": reading.peak_bytes,
            "peak_source": reading.peak_source,
            "reserved_bytes": reading.reserved_bytes,
            "static_bytes": memory.static_bytes,
        }
        card["throughput"] = stopwatch.figures()
        card["metrics"] = _metrics(trainer, module)
    if trainer.interrupted:
        raise KeyboardInterrupt
    if module.validated_step != trainer.global_step:
        trainer.validate(module, datamodule=data, verbose=False, weights_only=True)
        trainer.save_checkpoint(directory / "checkpoints" / "last.ckpt", weights_only=False)
        card["metrics"] = _metrics(trainer, module)
    if trainer.is_global_zero:
        _draw(trainer, module, data, directory / "val_samples.png", config["name"])
    return trainer


def _apply_plan(config: Mapping[str, Any], model: torch.nn.Module) -> dict[str, Any]:
    """Apply the plan of the configuration and describe it for the card."""
    options = {key: value for key, value in config.items() if key not in ("mode", "audit")}
    plan = make_plan(config["mode"], list(model.segments()), **options)  # type: ignore[operator]
    apply_activation_checkpointing(model, plan, audit=config["audit"])
    segments = [{"name": name, "policy": str(policy)} for name, policy in plan.items()]
    return {"mode": config["mode"], "segments": segments}


def _trainer(config: Mapping[str, Any], directory: Path, accumulate: int, watches: list[Callback]) -> Trainer:
    settings = config["trainer"]
    stopwatch, memory = watches
    assert isinstance(stopwatch, Stopwatch)
    assert isinstance(memory, MemoryWatch)
    on_terminal = sys.stdout.isatty()
    callbacks: list[Callback] = [
        *watches,
        ModelCheckpoint(
            directory / "checkpoints",
            filename="best",
            monitor="val_miou",
            mode="max",
            save_last=True,
            enable_version_counter=False,
        ),
        ProgressBar(stopwatch, memory)
        if on_terminal
        else ProgressLines(stopwatch, memory, settings["log_every_steps"]),
    ]
    if settings["ema_decay"] > 0:
        callbacks.append(EMAWeightAveraging(decay=settings["ema_decay"]))
    return Trainer(
        max_steps=settings["max_steps"],
        max_epochs=-1,
        accelerator=settings["accelerator"],
        devices=settings["devices"],
        precision=PRECISIONS[config["precision"]],  # type: ignore[arg-type]
        accumulate_grad_batches=accumulate,
        val_check_interval=settings["val_every_steps"] * accumulate,
        check_val_every_n_epoch=None,
        log_every_n_steps=settings["log_every_steps"],
        num_sanity_val_steps=0,
        use_distributed_sampler=False,  # the data module shards by itself
        deterministic=settings["deterministic"],
        default_root_dir=directory,
        logger=build_loggers(config["logger"], directory, config["name"]),
        callbacks=callbacks,
        enable_progress_bar=on_terminal,
        enable_model_summary=False,
    )


def _metrics(trainer: Trainer, module: SegmentationModule) -> dict[str, Any]:
    """The last validation; None where there was none."""
    values = {name: float(value) for name, value in trainer.callback_metrics.items()}
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
    draw_samples(
        path,
        [sample["image"] for sample in samples],
        [sample["mask"] for sample in samples],
        predictions,
        module.classes,
        title=f"{name}: validation after {trainer.global_step} steps",
    )


def _quiet() -> None:
    """Keep what says nothing to the user out of the output."""
    # Lightning brings a handler of its own, so each of its lines would appear twice under Hydra's logging.
    for name in ("lightning", "lightning.pytorch", "lightning.fabric", "pytorch_lightning"):
        logging.getLogger(name).handlers.clear()
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    # The run directory holds Hydra's files before the logger writes its first.
    warnings.filterwarnings("ignore", message=r"Experiment logs directory .* exists and is not empty")
    # Lightning 2.6 against torch's newer pytree.
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
    # The data module chooses its workers by the cores there are.
    warnings.filterwarnings("ignore", message=r"The '\w+' does not have many workers")
    # A short run may end before its first epoch's log interval; log_every_steps counts optimizer steps.
    warnings.filterwarnings(
        "ignore", message=r"The number of training batches .* is smaller than the logging interval"
    )


def _ending(error: BaseException) -> tuple[str, str]:
    """Status and error text of a run that ended by `error`."""
    text = f"{type(error).__name__}: {error}".strip(": ")
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error):
        return "out_of_memory", text
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return "interrupted", text
    return "failed", text


def _blank_card(config: Mapping[str, Any], command: str) -> dict[str, Any]:
    """The card with everything that is known before the run."""
    return {
        "schema": SCHEMA,
        "status": "failed",
        "error": None,
        "command": command,
        "config": dict(config),
        "seed": config["seed"],
        "code": code_state(),
        "environment": environment(),
        "device": {"name": "not reached", "memory_bytes": 0, "count": 0},
        "precision": PRECISIONS.get(config["precision"], config["precision"]),
        "strategy": "not reached",
        "weights": _weights_source(config["model"]["encoder"]["weights"]),
        "batch": {**config["batch"], "accumulate": None, "image_size": list(config["data"]["image_size"])},
        "activation_checkpointing": {"mode": config["activation_checkpointing"]["mode"], "segments": []},
        "memory": {
            "peak_bytes": None,
            "peak_source": None,
            "reserved_bytes": None,
            "predicted_peak_bytes": None,
            "static_bytes": None,
        },
        "throughput": {
            "samples_per_second": None,
            "step_seconds_median": None,
            "warmup_steps": 0,
            "data_wait_fraction": None,
        },
        "metrics": {"val_miou": None, "val_iou": {}, "val_loss": None, "val_samples": 0},
    }


def _weights_source(weights: str) -> str:
    return weights if weights in ("pretrained", "random") else f"file:{weights}"
