"""After an out-of-memory error: what led to it, and what would have fitted."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from seg4k.activation_checkpointing import Plan, make_plan
from seg4k.activation_checkpointing.segments import members
from seg4k.memory.auto import AutoPlanner, PlannedStep
from seg4k.memory.devices import Device
from seg4k.memory.ledger import Reading
from seg4k.memory.preflight import cheapest_changes, clearly_below, what_led
from seg4k.memory.readable import gib
from seg4k.memory.traced import STATIC
from seg4k.training.planning import Task, device_of, planned, policies_of, task_of, tracer_for

MODES = ("selective", "stage", "block")


def after_out_of_memory(config: Mapping[str, Any], card: Mapping[str, Any]) -> str:
    """What took the memory when it ran out, and the three cheapest changes that would fit, by trace.

    Args:
        config: of the run.
        card: of the run, with its memory and its plan.
    """
    memory = card["memory"]
    reading = Reading(memory["peak_bytes"], memory["peak_source"] or "", memory["reserved_bytes"])
    static = memory.get("breakdown")  # None in the first step
    try:
        device, task = device_of(config), task_of(config)
    except torch.OutOfMemoryError:  # there is not even enough left to look at the device
        led = what_led(reading, {kind: static[kind] for kind in STATIC}) if static else "Memory ran out."
        return f"{led} `seg4k plan` tells what would fit."
    applied = Plan({one["name"]: one["policy"] for one in card["activation_checkpointing"]["segments"]})
    budget = device.budget_bytes
    with tracer_for(config, task, device) as tracer:
        now = planned(tracer, device, applied)
        led = what_led(reading, {kind: (static or now.trace.static_kinds)[kind] for kind in STATIC})
        steps: dict[str, PlannedStep] = {}
        for mode in MODES:
            plan = make_plan(mode, tracer.segment_names)
            if plan != applied:
                steps[f"activation_checkpointing={mode}"] = planned(tracer, device, plan)
        # Left to the device's memory, auto might choose what has just failed.
        auto = max(1, clearly_below(budget, now) >> 10)
        best = AutoPlanner(tracer, device, policies_of({}, device)).at(auto << 10)
    if best is not None and best.plan not in [step.plan for step in steps.values()]:
        steps[f"activation_checkpointing=auto activation_checkpointing.budget={auto}KiB"] = best
    for name, changed in _smaller(config):
        steps[name] = _changed(config, changed, task, device, applied)
    fitting = cheapest_changes(steps, budget, now)
    if not fitting:
        return (
            f"{led} None of {', '.join(steps)} alone is predicted to fit with clearly less than this run's "
            f"{gib(now.trace.peak_bytes)}; `seg4k plan` tells what does."
        )
    return f"{led} What would fit, the cheapest first: {'; '.join(fitting)}."


def _smaller(config: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Changes that lower the peak whatever is recomputed."""
    batch = config["batch"]
    if batch["per_device"] > 1:
        half = batch["per_device"] // 2
        yield f"batch.per_device={half}", {**config, "batch": {**batch, "per_device": half}}
    if config["model"]["head"]["stride"] == 1:
        yield "model.head.stride=2", {**config, "model": {**config["model"], "head": {"stride": 2}}}
    if config["loss"].get("strips") not in ("auto", None):
        yield "loss.strips=auto", {**config, "loss": {**config["loss"], "strips": "auto"}}


def _changed(
    config: Mapping[str, Any], changed: Mapping[str, Any], task: Task, device: Device, plan: Plan
) -> PlannedStep:
    """The step of a changed configuration, with the time for as many images as before."""
    with tracer_for(changed, task, device) as tracer:
        there = set(tracer.segment_names)
        left = Plan({name: policy for name, policy in plan.items() if there.issuperset(members(name))})
        step = planned(tracer, device, left)
    times = config["batch"]["per_device"] / changed["batch"]["per_device"]
    return replace(step, seconds=step.seconds * times)
