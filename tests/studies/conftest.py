import csv
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

GIB = 2**30
# Peak GiB and samples/s of each mode, as a ViT-B at 4K might have them.
COSTS = {
    "none": (19.9, 1.0),
    "stage": (7.0, 0.78),
    "block": (7.7, 0.77),
    "layer": (6.6, 0.58),
    "encoder": (12.4, 0.82),
    "decoder": (14.1, 0.95),
    "selective": (7.6, 0.95),
    "auto": (7.2, 0.9),
}


def build_card(mode: str = "none", seed: int = 0, **changes: Any) -> dict[str, Any]:
    """A card as design.md has it; `changes` go to dotted paths, with `__` for the dot."""
    peak, speed = COSTS.get(mode, (8.0, 0.7))
    noise = random.Random(f"{mode} {seed}")
    miou = 0.62 + 0.01 * seed
    card = {
        "schema": 1,
        "status": "completed",
        "error": None,
        "command": f"python train.py activation_checkpointing={mode} seed={seed}",
        "config": {"seed": seed, "activation_checkpointing": {"mode": mode}, "optimizer": {"lr": 0.001}},
        "seed": seed,
        "code": {"version": "0.1.0", "git_sha": "abc", "dirty": False},
        "environment": {"torch": "2.14.1"},
        "device": {"name": "a GPU", "memory_bytes": 24 * GIB, "count": 1},
        "precision": "bf16-mixed",
        "strategy": "single",
        "weights": "pretrained",
        "batch": {"per_device": 1, "accumulate": 4, "effective": 4, "image_size": [2160, 3840]},
        "activation_checkpointing": {"mode": mode, "segments": []},
        "memory": {
            "peak_bytes": int(peak * GIB),
            "peak_source": "cuda_allocator",
            "reserved_bytes": int(1.1 * peak * GIB),
            "predicted_peak_bytes": int(peak * GIB),
            "static_bytes": int(1.6 * GIB),
        },
        "throughput": {
            "samples_per_second": speed * (1 + 0.02 * noise.uniform(-1, 1)),
            "step_seconds_median": 4 / speed,
            "warmup_steps": 3,
            "data_wait_fraction": 0.01,
        },
        "metrics": {
            "val_miou": miou,
            "val_iou": {"ocean": miou + 0.2, "land": miou, "lake": miou - 0.2},
            "val_loss": 0.3 - 0.01 * seed,
            "val_samples": 12,
        },
    }
    for path, value in changes.items():
        *steps, last = path.split("__")
        place: Any = card
        for step in steps:
            place = place[step]
        place[last] = value
    return card


def write_run(
    directory: Path, card: dict[str, Any] | None, *, steps: int = 60, picture: bool = False
) -> Path:
    """A run directory as training leaves it, without a card where `card` is None."""
    directory.mkdir(parents=True, exist_ok=True)
    seed = card["seed"] if card else 0
    noise = random.Random(seed)
    with (directory / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["epoch", "step", "train_loss", "val_loss", "val_miou"])
        writer.writeheader()
        for step in range(steps):
            loss = 0.3 + 2 * 0.95**step + 0.05 * noise.random()
            writer.writerow({"epoch": 0, "step": step, "train_loss": loss})
            if step % 10 == 9:
                writer.writerow({"step": step, "val_loss": loss + 0.1, "val_miou": 0.6 * (1 - 0.9**step)})
    if picture:
        image = np.random.default_rng(seed).integers(0, 255, (6, 18, 3), dtype=np.uint8)
        image = cv2.resize(image, (1800, 600), interpolation=cv2.INTER_NEAREST)
        cv2.imwrite(str(directory / "val_samples.png"), image)
    if card is not None:
        (directory / "run_card.json").write_text(json.dumps(card))
    return directory


@pytest.fixture
def card() -> Callable[..., dict[str, Any]]:
    return build_card


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Path]:
    """Write the run of a mode and seed below tmp_path, with changes to its card; return its directory."""

    def make(
        mode: str = "none", seed: int = 0, *, at: str | None = None, picture: bool = False, **changes: Any
    ) -> Path:
        return write_run(
            tmp_path / (at or f"{mode}/seed={seed}"), build_card(mode, seed, **changes), picture=picture
        )

    return make
