"""Runs as a user starts them, in processes of their own, to be killed or told to end."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent.parent
TWO = ("trainer.devices=2", "trainer.accelerator=cpu", "batch.per_device=1")
# Random inside the model, several epochs, validation and checkpoints that do not fall together.
TINY = (
    "experiment=smoke",
    "data=folder",
    "data.image_size=[32,48]",
    "data.val_size=null",
    "model.encoder.drop_path=0.3",
    "model.encoder.dropout=0.1",
    "trainer.max_steps=24",
    "trainer.val_every_steps=7",
    "trainer.checkpoint_every_steps=3",
    "logger.tensorboard=false",
)


def start(root: Path, directory: Path, *overrides: str, file_size: int | None = None):
    """`python train.py` on the folder at `root`, in `directory`; files end at `file_size` bytes."""

    def prepare() -> None:
        import resource

        # A shell that runs the tests in the background has them, and what they start, ignore Ctrl-C.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if file_size:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))

    return subprocess.Popen(
        [
            sys.executable,
            str(ROOT / "train.py"),
            *TINY,
            f"data.root={root}",
            f"hydra.run.dir={directory}",
            *overrides,
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=directory.parent,
        preexec_fn=prepare,
    )


def run(root: Path, directory: Path, *overrides: str, status: int = 0, **options) -> str:
    """Run to the end; its output."""
    process = start(root, directory, *overrides, **options)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == status, output
    return output


def first_step(process: subprocess.Popen) -> str:
    """Wait for the line of the first step that the process does."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("step"):
            return line
    raise AssertionError("".join(lines))


def last_weights(directory: Path) -> dict[str, torch.Tensor]:
    path = directory / "checkpoints" / "last.ckpt"
    return torch.load(path, map_location="cpu", weights_only=True)["state_dict"]


def weights_hash(directory: Path) -> str:
    """SHA-256 of the names and bits of the final weights."""
    digest = hashlib.sha256()
    for name, value in sorted(last_weights(directory).items()):
        digest.update(name.encode() + value.numpy().tobytes())
    return digest.hexdigest()


def card(directory: Path) -> dict:
    return json.loads((directory / "run_card.json").read_text())


def children(process: subprocess.Popen) -> list[int]:
    """The processes that it started, in order."""
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(word) for word in path.read_text().split()]
