"""One device or many: Lightning's strategies, and what cannot be combined."""

import inspect
import os
from collections.abc import Mapping
from typing import Any

import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy, Strategy
from torch.nn.parallel import DistributedDataParallel

from seg4k.errors import UserError
from seg4k.training.launch import Job, Launcher

# torch gave it another name.
_SYNC_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel).parameters
)
STRATEGIES = ("single", "ddp", "fsdp")
ACCELERATORS = ("auto", "cpu", "gpu")


class DDP(DDPStrategy):
    """`DDPStrategy` whose processes are started by `Launcher`."""

    def __init__(self, job: Job, **options: Any) -> None:  # noqa: ANN401 - DDPStrategy's own
        super().__init__(**options)
        self.job = job

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._launcher = Launcher(self.cluster_environment, self.num_processes, self.num_nodes, self.job)

    def meet(self) -> None:
        """Connect the processes, before Lightning does; once is enough."""
        self.setup_environment()


class FSDP(ModelParallelStrategy):
    """`ModelParallelStrategy` (FSDP2) over all devices, with weights saved whole, in one file.

    Args:
        job: what further processes are to run.
        devices: number of devices over all machines.
        cpu_offload: whether parameters lie in host memory.
    """

    def __init__(self, job: Job, devices: int, *, cpu_offload: bool) -> None:
        super().__init__(
            data_parallel_size=devices, tensor_parallel_size=1, save_distributed_checkpoint=False
        )
        self.job = job
        self.cpu_offload = cpu_offload

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._launcher = Launcher(self.cluster_environment, self.num_processes, self.num_nodes, self.job)

    def meet(self) -> None:
        """Connect the processes, before Lightning does; once is enough."""
        self._setup_distributed()

    def model_to_device(self) -> None:
        """Move the model to the device; where parameters are offloaded, its buffers only."""
        if not self.cpu_offload:
            super().model_to_device()
            return
        assert self.model is not None
        for buffer in self.model.buffers():
            buffer.data = buffer.data.to(self.root_device)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:  # noqa: ANN401
        """Load weights and what optimizers keep.

        An optimizer that keeps nothing (SGD without momentum, now or in the run that saved) has settings
        only, which the module has by itself. torch does not load them into a sharded model: it asks the
        tensors that it finds for their device.
        """
        optimizers = self.optimizers
        saved = torch.load(checkpoint_path, map_location="cpu", mmap=True, weights_only=True)
        kept = all(one["state"] for one in saved["optimizer_states"])
        if kept and all(group.get("momentum", 1.0) for one in optimizers for group in one.param_groups):
            return super().load_checkpoint(checkpoint_path, weights_only)
        self.optimizers = []
        try:
            content = super().load_checkpoint(checkpoint_path, weights_only)
        finally:
            self.optimizers = optimizers
        return content


def world_size(settings: Mapping[str, Any]) -> int:
    """Number of processes, one per device, from the `trainer` group."""
    return int(settings["devices"] * settings["num_nodes"])


def check_processes(config: Mapping[str, Any]) -> None:
    """Refuse strategies and numbers of devices that no machine could run.

    Raises:
        UserError: naming the setting.
    """
    strategy, settings = config["strategy"], config["trainer"]
    name = strategy["name"]
    if name not in STRATEGIES:
        raise UserError(f"strategy.name={name}: choose one of {', '.join(STRATEGIES)}")
    devices, nodes = settings["devices"], settings["num_nodes"]
    if not isinstance(devices, int) or devices < 1 or nodes < 1:
        raise UserError(
            f"trainer.devices={devices}, trainer.num_nodes={nodes}: give the number of devices of one "
            "machine and the number of machines, each 1 or more"
        )
    world = world_size(settings)
    if name == "single" and world > 1:
        raise UserError(
            f"strategy=single runs on one device, but trainer.devices x trainer.num_nodes is {world}: choose "
            "strategy=ddp, or strategy=fsdp where the model's own memory is too much"
        )


def check_strategy(config: Mapping[str, Any], accumulate: int | None = None) -> None:
    """Refuse what torch cannot do, with the reason.

    Args:
        config: the whole configuration.
        accumulate: forward passes per optimizer step, where they are known.

    Raises:
        UserError: naming the settings that do not go together.
    """
    check_processes(config)
    strategy, settings = config["strategy"], config["trainer"]
    name, devices, nodes = strategy["name"], settings["devices"], settings["num_nodes"]
    world = world_size(settings)
    started = int(os.environ.get("WORLD_SIZE", world))
    if started != world and "TORCHELASTIC_RUN_ID" in os.environ:
        raise UserError(
            f"torchrun started {started} processes, but trainer.devices={devices} x trainer.num_nodes={nodes}"
            ": set them (and strategy=ddp or fsdp) to what torchrun was told"
        )
    if name != "single" and SLURMEnvironment.detect():
        _check_slurm(devices, nodes)
    accelerator = settings["accelerator"]
    if accelerator not in ACCELERATORS:
        raise UserError(f"trainer.accelerator={accelerator}: choose one of {', '.join(ACCELERATORS)}")
    gpu = uses_gpu(accelerator)
    if accelerator == "gpu" and not gpu:
        raise UserError(
            "trainer.accelerator=gpu: torch finds no CUDA device here; set trainer.accelerator=auto or cpu"
        )
    if gpu and devices > torch.cuda.device_count():
        raise UserError(
            f"trainer.devices={devices}, but this machine has {torch.cuda.device_count()} GPU(s); set "
            "trainer.devices, or trainer.accelerator=cpu"
        )
    if strategy.get("sync_batchnorm") and not gpu:
        raise UserError(
            "strategy.sync_batchnorm=true: torch synchronises batch norms on GPUs only; on the CPU set it to "
            "false, or model.decoder.norm=group, which needs no synchronising"
        )
    if strategy.get("cpu_offload") and not gpu:
        raise UserError(
            "strategy.cpu_offload=true: on the CPU there is nowhere to offload to; set it to false"
        )
    if strategy.get("static_graph"):
        if accumulate is not None and accumulate > 1:
            raise UserError(
                "strategy.static_graph=true: DDP's static graph takes a step with and one without exchange "
                f"of gradients for two graphs, so it cannot accumulate {accumulate} forward passes; set "
                "strategy.static_graph=false, or batch.effective to batch.per_device x devices"
            )
        if strategy.get("find_unused_parameters"):
            raise UserError(
                "strategy.static_graph and strategy.find_unused_parameters exclude each other: with a static "
                "graph DDP finds unused parameters by itself, once; set one of them to false"
            )
    if name == "fsdp" and config["precision"] == "fp16":
        raise UserError(
            "precision=fp16 with strategy=fsdp: Lightning's sharded strategy has no gradient scaler; set "
            "precision=bf16"
        )
    if name == "fsdp" and config["optimizer"]["name"] == "adamw_8bit":
        raise UserError(
            "optimizer=adamw_8bit with strategy=fsdp: moments quantised by torchao in blocks cannot be read "
            "back into shards that end inside a block, so the run could not go on from its checkpoint; "
            "fsdp divides the moments of optimizer=adamw by the number of devices"
        )
    if name == "fsdp" and settings["ema_decay"] > 0:
        raise UserError(
            f"trainer.ema_decay={settings['ema_decay']} with strategy=fsdp: the moving average would keep a "
            "whole copy of a model that is sharded; set trainer.ema_decay=0 or strategy=ddp"
        )


def _check_slurm(devices: int, nodes: int) -> None:
    tasks = int(os.environ["SLURM_NTASKS"])
    each = os.environ.get("SLURM_NTASKS_PER_NODE")
    if tasks != devices * nodes or (each is None and tasks > 1) or int(each or 1) != devices:
        raise UserError(
            f"SLURM started {tasks} task(s), {each or 'an unknown number'} on each node, but trainer.devices="
            f"{devices} x trainer.num_nodes={nodes}: start it with srun --nodes={nodes} --ntasks-per-node="
            f"{devices}, one task for each device, or set trainer.devices and trainer.num_nodes to fit"
        )


def cluster() -> list[SLURMEnvironment]:
    """SLURM without Lightning's own requeueing, which would write a checkpoint in the middle of a step."""
    return [SLURMEnvironment(auto_requeue=False)] if SLURMEnvironment.detect() else []


def build_strategy(config: Mapping[str, Any], job: Job) -> Strategy:
    """Make the strategy of the `strategy` group of the configuration; see `check_strategy`."""
    strategy, settings = config["strategy"], config["trainer"]
    if strategy["name"] == "single":
        device = (
            torch.device("cuda", torch.cuda.current_device()) if uses_gpu(settings["accelerator"]) else "cpu"
        )
        return SingleDeviceStrategy(device=device)
    if strategy["name"] == "ddp":
        return DDP(
            job,
            find_unused_parameters=strategy["find_unused_parameters"],
            static_graph=strategy["static_graph"],
            **{_SYNC_BUFFERS: False},  # `average_running_statistics` keeps them alike, at each optimizer step
            gradient_as_bucket_view=True,
        )
    return FSDP(job, world_size(settings), cpu_offload=strategy["cpu_offload"])


def connect_early(strategy: Strategy) -> bool:
    """Connect the processes of torchrun or SLURM before Lightning does, and say whether that was done.

    Those of `Launcher` are not there yet.
    """
    if not isinstance(strategy, DDP | FSDP) or strategy.world_size == 1:
        return False
    environment = strategy.cluster_environment
    if environment is None or not environment.creates_processes_externally:
        return False
    strategy.meet()
    return True


def uses_gpu(accelerator: str) -> bool:
    """Whether `trainer.accelerator` means CUDA here."""
    return accelerator in ("auto", "gpu") and torch.cuda.is_available()
