"""Lightning's own loggers, and the artifacts that they keep where the tracker has them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger

from seg4k.errors import UserError
from seg4k.training.metrics_csv import MetricsCsv

ARTIFACTS = ("run_card.json", "run_card.md", "val_samples.png")


def build_loggers(
    config: Mapping[str, Any], directory: Path, name: str, resumed_step: int | None = None
) -> list[Logger]:
    """Make the loggers of the `logger` group of the configuration.

    Args:
        config: `csv`, `tensorboard`, and of one tracker its settings (`mlflow` or `wandb`).
        directory: the run directory.
        name: the experiment's name, under which a tracker files the run.
        resumed_step: where a run is gone on with, the optimizer step of its checkpoint.

    Raises:
        UserError: the tracker's package is not installed.
    """
    loggers: list[Logger] = []
    if config["csv"]:
        loggers.append(MetricsCsv(directory / "metrics.csv", resumed_step))
    if config["tensorboard"]:
        # What a killed run wrote beyond its checkpoint is left out of the curves.
        purge = None if resumed_step is None else resumed_step + 1
        loggers.append(TensorBoardLogger(directory, name="tensorboard", version="", purge_step=purge))
    if "mlflow" in config:
        loggers.append(_mlflow(config["mlflow"], directory, name))
    if "wandb" in config:
        loggers.append(_wandb(config["wandb"], directory, name))
    return loggers


def _mlflow(settings: Mapping[str, Any], directory: Path, name: str) -> Logger:
    from lightning.pytorch.loggers import MLFlowLogger

    try:
        return MLFlowLogger(
            experiment_name=name,
            run_name=directory.name,
            tracking_uri=settings["tracking_uri"],
            artifact_location=settings["artifact_location"],
        )
    except ModuleNotFoundError as error:
        raise UserError("logger=mlflow: MLflow is not installed; pip install 'seg4k[mlflow]'") from error


def _wandb(settings: Mapping[str, Any], directory: Path, name: str) -> Logger:
    from lightning.pytorch.loggers import WandbLogger

    try:
        return WandbLogger(project=name, name=directory.name, save_dir=directory, offline=settings["offline"])
    except ModuleNotFoundError as error:
        raise UserError("logger=wandb: wandb is not installed; pip install 'seg4k[wandb]'") from error


def log_artifacts(loggers: Sequence[Logger], directory: Path) -> None:
    """Hand run card and pictures to the trackers that keep files."""
    files = [directory / name for name in ARTIFACTS if (directory / name).is_file()]
    for logger in loggers:
        kind = type(logger).__name__
        if kind == "MLFlowLogger":
            for file in files:
                logger.experiment.log_artifact(logger.run_id, str(file))  # type: ignore[attr-defined]
        elif kind == "WandbLogger":
            for file in files:
                logger.experiment.save(str(file), base_path=str(directory), policy="now")  # type: ignore[attr-defined]
