"""What is kept out of a run's output."""

import logging
import warnings


def quiet() -> None:
    """Keep what says nothing to the user out of the output."""
    # These bring handlers of their own, so each of their lines would appear twice under Hydra's logging.
    for name in (
        "lightning",
        "lightning.pytorch",
        "lightning.fabric",
        "pytorch_lightning",
        "huggingface_hub",
    ):
        logging.getLogger(name).handlers.clear()
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric.utilities.distributed").setLevel(logging.WARNING)
    # DDP on the gradient of a single token, whose outermost stride, of size 1, means nothing.
    warnings.filterwarnings("ignore", message=r"Grad strides do not match bucket view strides")
    # The run directory holds Hydra's files before the logger writes its first.
    warnings.filterwarnings("ignore", message=r"Experiment logs directory .* exists and is not empty")
    # Lightning 2.6 against torch's newer pytree.
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
    # trainer.accelerator=cpu is meant so, and Apple's device is not for us.
    warnings.filterwarnings("ignore", message=r"GPU available but not used")
    # The data module chooses its workers by the cores there are.
    warnings.filterwarnings("ignore", message=r"The '\w+' does not have many workers")
    # Validation's scores are those of all processes before they are logged.
    warnings.filterwarnings("ignore", message=r"It is recommended to use `self.log\(")
    # A short run may end before its first epoch's log interval; log_every_steps counts optimizer steps.
    warnings.filterwarnings(
        "ignore", message=r"The number of training batches .* is smaller than the logging interval"
    )
