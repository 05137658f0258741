"""The run card: what a run was, what it cost and what it reached, whatever way it ended."""

import math
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import seg4k
from seg4k.files import write_json, write_text
from seg4k.memory.shortage import is_out_of_memory

SCHEMA = 1
# In Lightning's words.
PRECISIONS = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed", "fp64": "64-true"}
STATUSES = ("completed", "out_of_memory", "failed", "interrupted")
PACKAGES = ("torch", "lightning", "timm", "segmentation-models-pytorch", "albumentations", "numpy")


def finite(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """The value with NaN and infinity as None, which JSON can hold."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [finite(entry) for entry in value]
    return value


def code_state() -> dict[str, Any]:
    """Version and git state of the code that runs; no git state where it is no checkout."""
    state: dict[str, Any] = {"version": seg4k.__version__, "git_sha": None, "dirty": None}
    root = Path(seg4k.__file__).parent.parent
    if (root / ".git").exists():
        try:
            state["git_sha"] = _git(root, "rev-parse", "HEAD").strip()
            # Results are no code: a suite that writes its first does not change what it measures.
            others = (".", ":(exclude)benchmarks/results")
            state["dirty"] = bool(_git(root, "status", "--porcelain", "--", *others).strip())
        except (OSError, subprocess.SubprocessError):
            pass  # no git here: the version must do
    return state


def _git(root: Path, *arguments: str) -> str:
    # The project's own files only: what a user keeps beside them does not make the code dirty.
    return subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=10
    ).stdout


def environment() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def write_card(directory: Path, card: Mapping[str, Any]) -> None:
    """Write `run_card.json` and `run_card.md`, each atomically."""
    assert card["status"] in STATUSES
    card = finite(card)
    write_text(directory / "run_card.md", render(card))
    write_json(directory / "run_card.json", card)


def readable_bytes(value: float | None) -> str:
    """Bytes in MiB or GiB, for reading."""
    if value is None:
        return "not measured"
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.1f} MiB"


def render(card: Mapping[str, Any]) -> str:
    """The card as Markdown, for people."""
    batch, memory, speed, metrics = (card[key] for key in ("batch", "memory", "throughput", "metrics"))
    plan = card["activation_checkpointing"]
    size = batch["image_size"]
    pixels = f"{size[1]} x {size[0]}" if isinstance(size, list | tuple) and len(size) == 2 else f"size {size}"
    rows = [
        ("status", card["status"] + (f": {card['error']}" if card["error"] else "")),
        ("command", f"`{card['command']}`"),
        ("code", f"seg4k {card['code']['version']}, {_sha(card['code'])}"),
        ("device", f"{card['device']['count']} x {card['device']['name']}"),
        ("precision, strategy", f"{card['precision']}, {card['strategy']}"),
        ("encoder weights", card["weights"]),
        ("seed", str(card["seed"])),
        (
            "batch",
            f"{batch['per_device']} per device x {batch['accumulate']} accumulated = "
            f"{batch['effective']} images of {pixels}",
        ),
        ("activation checkpointing", f"{plan['mode']}, {len(plan['segments'])} segments recomputed"),
        ("peak memory", _peak(memory)),
        ("of it parameters, gradients, optimizer", readable_bytes(memory["static_bytes"])),
        ("speed", _speed(speed)),
        ("validation mIoU", _score(metrics["val_miou"])),
        ("validation loss", _score(metrics["val_loss"])),
    ]
    if memory["reserved_bytes"] is not None:
        rows.insert(10, ("reserved by the allocator", readable_bytes(memory["reserved_bytes"])))
    if memory["predicted_peak_bytes"] is not None:
        rows.insert(10, ("predicted peak", readable_bytes(memory["predicted_peak_bytes"])))
    lines = [f"# Run card: {card['config'].get('name', 'run')}", "", "| | |", "| --- | --- |"]
    lines += [f"| {name} | {str(value).replace('|', '/')} |" for name, value in rows]
    if metrics["val_iou"]:
        lines += ["", f"| class | IoU over {metrics['val_samples']} samples |", "| --- | --- |"]
        lines += [f"| {name} | {_score(value)} |" for name, value in metrics["val_iou"].items()]
    lines += [
        "",
        "Versions: " + ", ".join(f"{key} {value}" for key, value in card["environment"].items()) + ".",
    ]
    return "\n".join(lines) + "\n"


def _sha(code: Mapping[str, Any]) -> str:
    if code["git_sha"] is None:
        return "not a checkout"
    return f"commit {code['git_sha'][:12]}" + (" with local changes" if code["dirty"] else "")


def _speed(speed: Mapping[str, Any]) -> str:
    if speed["samples_per_second"] is None:
        return "not measured: the run ended within its warm-up"
    wait = speed["data_wait_fraction"]
    return (
        f"{speed['samples_per_second']:.3g} samples/s, {speed['step_seconds_median']:.3g} s a step (median), "
        f"{wait:.1%} of it waiting for data"
    )


def _peak(memory: Mapping[str, Any]) -> str:
    peak = f"{readable_bytes(memory['peak_bytes'])} ({memory['peak_source']})"
    ranks = memory.get("peak_bytes_per_rank") or []
    if len(ranks) < 2:
        return peak
    return f"{peak}, the largest of {', '.join(map(readable_bytes, ranks))}"


def _score(value: float | None) -> str:
    return "absent" if value is None else f"{value:.4f}"


def device_state(device_type: str, index: int | None, count: int) -> dict[str, Any]:
    """Name and memory of the device that a run computes on."""
    if device_type == "cuda":
        properties = torch.cuda.get_device_properties(index or 0)
        return {"name": properties.name, "memory_bytes": properties.total_memory, "count": count}
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
    return {
        "name": f"{platform.machine()} CPU, {os.cpu_count()} cores",
        "memory_bytes": pages,
        "count": count,
    }


def ending(error: BaseException) -> tuple[str, str]:
    """Status and error text of a run that ended by `error`."""
    text = f"{type(error).__name__}: {error}".strip(": ")
    if is_out_of_memory(error):
        return "out_of_memory", text
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return "interrupted", text
    return "failed", text


def blank_card(config: Mapping[str, Any], command: str) -> dict[str, Any]:
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
        "batch": {**config["batch"], "accumulate": None, "image_size": config["data"]["image_size"]},
        "activation_checkpointing": {"mode": config["activation_checkpointing"]["mode"], "segments": []},
        "memory": {
            "peak_bytes": None,
            "peak_bytes_per_rank": None,
            "peak_source": None,
            "reserved_bytes": None,
            "predicted_peak_bytes": None,
            "static_bytes": None,
            "breakdown": None,
        },
        "throughput": {
            "samples_per_second": None,
            "step_seconds_median": None,
            "warmup_steps": 0,
            "data_wait_fraction": None,
        },
        "faults": {"resumed_from_step": None, "skipped_steps": 0},
        "metrics": {"val_miou": None, "val_iou": {}, "val_loss": None, "val_samples": 0},
    }


def _weights_source(weights: str | None) -> str:
    return weights if weights in ("pretrained", "random") else f"file:{weights}"
