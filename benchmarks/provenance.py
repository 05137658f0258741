"""What every result says beside its figures: command, date, code, versions, hardware."""

import contextlib
import datetime
import os
import platform
import re
import shlex
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from seg4k.training.run_card import code_state, device_state, environment

RESULTS = Path(__file__).parent / "results"


def provenance(config, command=None):
    """The part of a result that says how to make it again.

    Args:
        config: what was measured, as plain values.
        command: as it was typed; this process's if None.
    """
    cuda = torch.cuda.is_available()
    versions = environment()
    with contextlib.suppress(PackageNotFoundError):
        versions["transformers"] = version("transformers")
    return {
        "schema": 1,
        "command": command or shlex.join(["python", *relative(sys.argv)]),
        "date": datetime.date.today().isoformat(),
        "config": config,
        "code": code_state(),
        "environment": versions,
        "device": device_state("cuda" if cuda else "cpu", 0 if cuda else None, 1),
        "processor": processor(),
        "threads": torch.get_num_threads(),
    }


def child_environment():
    """The environment of a child process that imports what this one does, from the same places."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(path or os.curdir for path in sys.path)}


def relative(words):
    """Arguments with the repository's own path taken out."""
    root = f"{Path(__file__).parent.parent}/"
    return [word.replace(root, "") for word in words]


def processor():
    """The processor's name, as Linux has it."""
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()
