"""Sort runs into arms and pair each arm's runs with the baseline's."""

import json
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from seg4k.studies.collect import Run, lookup, mode_order
from seg4k.studies.words import group_name, shorten

Key = tuple[Any, ...]


@dataclass(frozen=True)
class Arm:
    """Runs that differ only in their seed (and in what else a sweep varied besides the arms).

    Attributes:
        mode: the activation checkpointing mode.
        strategy: the parallel strategy.
        devices: number of devices.
        settings: options of activation checkpointing that vary within the mode, e.g. `blocks_per_segment`.
        label: the name in tables; the bare mode where that says all.
        runs: all of its runs, whatever their status.
        keys: pairing key of each completed run -> that run.
    """

    mode: str
    strategy: str
    devices: int
    settings: Mapping[str, Any]
    label: str
    runs: list[Run] = field(repr=False)
    keys: dict[Key, Run] = field(repr=False)

    @property
    def group(self) -> tuple[str, int]:
        """Arms are compared with the baseline of the same strategy and device count only."""
        return self.strategy, self.devices

    @property
    def completed(self) -> list[Run]:
        """The runs that ended by themselves."""
        return [run for run in self.runs if run.completed]

    def median(self, value: Callable[[Run], float | None]) -> float | None:
        """Median of a value over the completed runs that have it."""
        values = [one for one in map(value, self.completed) if one is not None]
        return statistics.median(values) if values else None


def make_arms(runs: Sequence[Run]) -> list[Arm]:
    """Group runs into arms, ordered by mode, devices, strategy and settings (large numbers first).

    Strategy and device count are part of an arm's label where more than one combination occurs.
    """
    settings = _varying_settings(runs)
    # A run that left no card cannot tell its strategy: it belongs to the only group there is, if so.
    known = sorted({(run.strategy, run.devices) for run in runs if run.strategy})
    grouped: dict[tuple[Any, ...], list[Run]] = defaultdict(list)
    for run in runs:
        group = (run.strategy, run.devices) if run.strategy or len(known) != 1 else known[0]
        grouped[(run.mode, *group, tuple(settings[run.name].items()))].append(run)
    extra = extra_keys(list(grouped.values()))
    many = len({key[1:3] for key in grouped}) > 1
    arms = []
    for (mode, strategy, devices, items), members in grouped.items():
        chosen = dict(items)
        label = _label(mode, strategy, devices, chosen, many)
        arms.append(Arm(mode, strategy, devices, chosen, label, members, _keyed(members, extra)))
    return sorted(arms, key=_arm_order)


def baseline_of(arm: Arm, arms: Sequence[Arm], mode: str) -> Arm | None:
    """The arm of the baseline mode with the same strategy and device count, None where there is none."""
    return next((other for other in arms if other.mode == mode and other.group == arm.group), None)


def paired(first: Arm, second: Arm) -> list[tuple[Run, Run]]:
    """Completed runs of both arms that share everything but the arm, in order of seed."""
    return [(run, second.keys[key]) for key, run in first.keys.items() if key in second.keys]


def extra_keys(groups: Sequence[Sequence[Run]]) -> list[str]:
    """Config keys that a sweep varied besides seed and arm.

    They are those that differ between runs of one arm with one seed: without them such runs could not be
    paired with the right ones of another arm.
    """
    varied: set[str] = set()
    for members in groups:
        by_seed: dict[int | None, list[Run]] = defaultdict(list)
        for run in members:
            if run.completed:
                by_seed[run.seed].append(run)
        for same_seed in by_seed.values():
            configs = [flat_config(run) for run in same_seed]
            for key in set().union(*configs):
                if any(config.get(key) != configs[0].get(key) for config in configs):
                    varied.add(key)
    return sorted(varied)


def differing_keys(first: Run, second: Run) -> list[str]:
    """What two runs differ in besides their mode and seed, each as `name (one / other)`."""
    parts = (
        "precision",
        "batch",
        "weights",
        "environment.torch",
        "device.name",
        "code.git_sha",
        "code.dirty",
    )
    here, there = flat_config(first), flat_config(second)
    for part in parts:
        for flat, run in ((here, first), (there, second)):
            value = lookup(run.card, *part.split("."))
            flat.update(_flatten(value, part) if isinstance(value, Mapping) else {part: json.dumps(value)})
    return [
        f"{key} ({shorten(here.get(key, 'absent'), 24)} / {shorten(there.get(key, 'absent'), 24)})"
        for key in sorted(here.keys() | there.keys())
        if here.get(key) != there.get(key)
    ]


def flat_config(run: Run) -> dict[str, str]:
    """The config of a run, flattened to dotted keys and JSON texts.

    Seed, activation checkpointing and how the run was started (`resume`, `sweep`) are left out, and the run's
    own directory is written as `<run>`.
    """
    config = run.card.get("config")
    if not isinstance(config, Mapping):
        return {}
    apart = ("activation_checkpointing", "seed", "resume", "sweep")
    kept = {key: value for key, value in config.items() if key not in apart}
    flat = _flatten(kept)
    own = re.compile(rf"(?<=/){re.escape(run.name)}(?=[/\"])")
    return {key: own.sub("<run>", text) for key, text in flat.items()}


def _flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, item in value.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(item, Mapping):
            flat.update(_flatten(item, name))
        else:
            flat[name] = json.dumps(item, sort_keys=True, ensure_ascii=False)
    return flat


def _varying_settings(runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """Run name -> those of its activation checkpointing options that vary within its mode."""
    options = {run.name: lookup(run.card, "config", "activation_checkpointing") for run in runs}
    chosen: dict[str, dict[str, Any]] = {}
    for run in runs:
        own = options[run.name]
        if not isinstance(own, Mapping):
            chosen[run.name] = {}
            continue
        others = [options[other.name] for other in runs if other.mode == run.mode]
        others = [other for other in others if isinstance(other, Mapping)]
        varying = [
            key
            for key in sorted(own)
            if key != "mode" and any(other.get(key) != own[key] for other in others)
        ]
        chosen[run.name] = {
            key: own[key] if isinstance(own[key], int | float | str | None) else json.dumps(own[key])
            for key in varying
        }
    return chosen


def _label(mode: str, strategy: str, devices: int, settings: Mapping[str, Any], with_group: bool) -> str:
    inside = ", ".join(f"{key}={value}" for key, value in settings.items())
    group = f" · {group_name(strategy, devices)}" if with_group else ""
    return f"{mode} ({inside}){group}" if inside else f"{mode}{group}"


def _keyed(members: Sequence[Run], extra: Sequence[str]) -> dict[Key, Run]:
    """Completed runs by (seed, what else varied, number among equals)."""
    keyed: dict[Key, Run] = {}
    for run in members:
        if not run.completed:
            continue
        config = flat_config(run)
        key: Key = (run.seed, *(config.get(name) for name in extra))
        repeat = 0
        while (*key, repeat) in keyed:
            repeat += 1
        keyed[(*key, repeat)] = run
    return keyed


def _arm_order(arm: Arm) -> tuple[Any, ...]:
    # Numbers before texts, large ones first: many blocks in a segment are coarser than few.
    settings = [
        (0, -float(value), "") if isinstance(value, int | float) else (1, 0.0, str(value))
        for value in arm.settings.values()
    ]
    return (*mode_order(arm.mode), arm.devices, arm.strategy, settings, arm.label)
