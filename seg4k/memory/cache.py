"""Keeping reports, so that the same question is answered at once the second time. Standard library only."""

import contextlib
import hashlib
import json
import os
import platform
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from seg4k.files import write_json

__all__ = ["cache_directory", "cached", "question"]

_GPUS = Path("/proc/driver/nvidia/gpus")
_PACKAGES = ("torch", "timm", "segmentation-models-pytorch", "lightning")


def cache_directory() -> Path:
    """Where answers are kept: below XDG_CACHE_HOME, or else ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "seg4k" / "plans"


def _fingerprint(question: Mapping[str, Any]) -> str:
    """A name for a question and all that the answer depends on: versions, and this package's source."""
    digest = hashlib.sha256(json.dumps(question, sort_keys=True, default=str).encode())
    for package in _PACKAGES:
        try:
            digest.update(f"{package} {version(package)}\n".encode())
        except PackageNotFoundError:
            continue
    root = Path(__file__).parents[1]
    for source in sorted(root.rglob("*.py")):
        digest.update(source.relative_to(root).as_posix().encode())
        digest.update(source.read_bytes())
    return digest.hexdigest()[:32]


def cached(
    directory: Path | str, question: Mapping[str, Any], answer: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """The answer to a question, from `directory` where it was asked before, and else from `answer()`.

    Args:
        directory: of the cache; made where it is missing. Where it cannot be, nothing is kept.
        question: plain values that the answer depends on (the configuration, the device, the budget).
        answer: makes it, as plain JSON values.
    """
    path = Path(directory) / f"{_fingerprint(question)}.json"
    try:
        known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return known
    except (OSError, ValueError):
        made = answer()
    with contextlib.suppress(OSError):  # nowhere to keep it: it is asked again the next time
        write_json(path, made)
    return made


def question(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a plan depends on: configuration, files that it names, and the machine where that is meant."""
    asked = {key: value for key, value in config.items() if key not in ("name", "seed", "logger", "speed")}
    if config["data"].get("root"):
        root = Path(config["data"]["root"])
        files = [*sorted(root.glob("classes.*")), *sorted(root.glob("config*.json"))]
        given = config["data"].get("class_file")
        files += [Path(given)] if given and Path(given).is_file() else []
        asked["classes"] = [file.read_text(encoding="utf-8") for file in files]
    plan = config["activation_checkpointing"].get("path")
    if plan and Path(plan).is_file():  # one that is missing is a mistake that the answer tells of
        asked["plan file"] = hashlib.sha256(Path(plan).read_bytes()).hexdigest()
    device = config["device"]
    if device["name"] == "this":
        asked["machine"] = _machine()
    elif device.get("memory_bytes") is None:
        asked["machine"] = {"memory": _memory()}
    return asked


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _machine() -> dict[str, Any]:
    """What is known of this machine without asking torch: that its figures are still those of another day."""
    variables = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
    return {
        "cpu": [platform.node(), platform.processor(), os.cpu_count()],
        "usable cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "memory": _memory(),
        "gpus": [line for file in sorted(_GPUS.glob("*/information")) for line in _model(file)],
        **{name: os.environ.get(name) for name in variables},
    }


def _model(information: Path) -> list[str]:
    """What NVIDIA's driver calls a GPU, with its place on the bus."""
    try:
        lines = information.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return [information.parent.name, *(line for line in lines if line.startswith(("Model:", "GPU UUID:")))]
