"""Starting the other processes of a run, and ending them together.

Lightning's own launcher runs the command line again, with Hydra's hooks in it. Here each further process is
given the composed configuration itself, so that it does not matter who composed it: `python train.py`, `seg4k
train`, a point of a sweep, a test.
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher

import seg4k

POLL_SECONDS = 0.5
# How long a process may take to end by itself after another one failed: time to print its own error.
GRACE_SECONDS = 15.0
SETTLE_SECONDS = 3.0
WORLD_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


@dataclass
class Job:
    """What every process of a run is to do: the arguments of `train`.

    Attributes:
        config: the whole configuration, plain values.
        directory: the run directory.
        command: the command as it was typed.
        preflight: the plan and its predicted peak, once known, so that no process finds out again.
        on_lost: called in the first process when another has failed and this one hangs; it must not return.
    """

    config: dict[str, Any]
    directory: str
    command: str
    preflight: dict[str, Any] | None = None
    on_lost: Callable[[str], None] | None = field(default=None, repr=False)

    def to_json(self) -> str:
        """The job for another process."""
        job = {key: value for key, value in asdict(self).items() if key != "on_lost"}
        return json.dumps({**job, "parent": os.getpid()})


class Launcher(_SubprocessScriptLauncher):
    """Starts `seg4k.training.worker` for each further device of this machine, once.

    Where torchrun or SLURM have started the processes it starts none.

    Attributes:
        lost: what is known of a process that failed, else None.
    """

    def __init__(
        self, cluster_environment: ClusterEnvironment, num_processes: int, num_nodes: int, job: Job
    ) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        self.job = job
        self.lost: str | None = None
        self._ended = threading.Event()

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:  # noqa: ANN401
        """Start the processes unless they run, then call `function`."""
        environment = self.cluster_environment
        environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.procs and not environment.creates_processes_externally and self.num_processes > 1:
            self._start()
            threading.Thread(target=self._watch, daemon=True, name="seg4k-watch").start()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)

    def _start(self) -> None:
        environment = self.cluster_environment
        root = str(Path(seg4k.__file__).parent.parent)
        variables = {
            **os.environ,
            "MASTER_ADDR": environment.main_address,
            "MASTER_PORT": str(environment.main_port),
            "NODE_RANK": str(environment.node_rank()),
            "WORLD_SIZE": str(self.num_processes * self.num_nodes),
            "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))),
        }
        for rank in range(1, self.num_processes):
            process = subprocess.Popen(
                [sys.executable, "-m", "seg4k.training.worker"],
                env={**variables, "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,
                text=True,
            )
            assert process.stdin is not None
            process.stdin.write(self.job.to_json())
            process.stdin.close()
            self.procs.append(process)

    def _watch(self) -> None:
        while not self._ended.wait(POLL_SECONDS):
            self._look()
            if self.lost is not None and not self._ended.wait(GRACE_SECONDS):
                self._kill()
                if self.job.on_lost is not None:
                    self.job.on_lost(self.lost)

    def _look(self) -> None:
        """Note the first process that failed."""
        for rank, process in enumerate(self.procs, start=1):
            status = process.poll()
            if status and self.lost is None:
                self.lost = f"process {rank} ended with status {status}; its own error is in the output"

    def failure(self, error: Exception) -> str | None:
        """What is known of a process that failed, once those that are about to have had the time.

        Args:
            error: what was raised in this process; where a connection broke, another process broke it.
        """
        broken = isinstance(error, torch.distributed.DistError) or "onnection" in str(error)
        deadline = time.monotonic() + (GRACE_SECONDS if broken else SETTLE_SECONDS)
        self._look()
        while self.procs and self.lost is None and time.monotonic() < deadline:
            time.sleep(0.05)
            self._look()
        return self.lost

    def end(self, *, failed: bool) -> None:
        """Wait for the other processes; where this one failed, or they take too long, kill them."""
        self._look()
        self._ended.set()
        deadline = time.monotonic() + (SETTLE_SECONDS if failed else 60.0)
        for process in self.procs:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _kill(self) -> None:
        for process in self.procs:
            if process.poll() is None:
                process.kill()


def end_with_parent(parent: int) -> None:
    """End this process when `parent`, the one that started it, is gone, whatever this one is doing."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_SECONDS)
        print("seg4k: the first process is gone; ending", file=sys.stderr, flush=True)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="seg4k-parent").start()
