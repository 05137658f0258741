"""From a configuration to a plan and what it will cost, before anything is trained."""

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from seg4k.activation_checkpointing import Plan, Policy, make_plan
from seg4k.data.build import build_datamodule
from seg4k.errors import PlanDoesNotFit, UserError
from seg4k.memory.auto import AutoPlanner, PlannedStep
from seg4k.memory.budget import Budget
from seg4k.memory.cache import cache_directory, cached
from seg4k.memory.costs import step_seconds
from seg4k.memory.devices import Device, device_from_dict, this_device
from seg4k.memory.measured import measure_segments
from seg4k.memory.preflight import does_not_fit, largest_batch
from seg4k.memory.readable import gib
from seg4k.memory.report import plan_report
from seg4k.memory.tracer import Tracer
from seg4k.training.plan_checks import check_planned
from seg4k.training.strategies import check_processes, world_size
from seg4k.training.traced_step import build_step


@dataclass(frozen=True)
class Task:
    """What of the data a step depends on."""

    num_classes: int
    in_channels: int
    ignore_index: int


@dataclass(frozen=True)
class Prediction:
    """A plan and what it is predicted to cost."""

    plan: Plan
    step: PlannedStep
    baseline: PlannedStep
    budget: Budget
    report: Mapping[str, Any]


def device_of(config: Mapping[str, Any]) -> Device:
    """The device of the `device` group; `this` is the machine at hand.

    Raises:
        UserError: figures that are missing or impossible.
    """
    settings = config["device"]
    if settings["name"] != "this":
        return device_from_dict(settings)
    device = this_device()
    if config["trainer"]["accelerator"] == "cpu" and device.kind != "cpu":
        raise UserError("trainer.accelerator=cpu with a GPU at hand: set device=cpu")
    return device


def with_speeds(device: Device, tracer: Tracer, config: Mapping[str, Any], task: Task) -> Device:
    """The device with the seconds of each segment, measured once where it is this machine."""
    if config["device"]["name"] != "this":
        return device
    data, batch = config["data"], config["batch"]
    step = {
        "model": config["model"],
        "precision": config["precision"],
        "image_size": data["image_size"],
        "per_device": batch["per_device"],
        "task": [task.num_classes, task.in_channels],
    }
    machine = [device.name, device.memory_bytes, platform.node(), platform.processor(), os.cpu_count()]

    def measure() -> dict[str, Any]:
        held = tracer.trace(Plan(), with_held=True).held
        assert held is not None
        built = build_step(config, task.num_classes, task.in_channels, task.ignore_index)
        return measure_segments(built, held.arguments, torch.device(device.kind))

    known = cached(cache_directory(), {"segments of": step, "on": machine}, measure)
    return replace(device, measured=known)


def predict(
    config: Mapping[str, Any], task: Task, *, device: Device | None = None, speeds: bool = True
) -> Prediction:
    """Trace the configured step, and in mode `auto` find its plan.

    Args:
        config: the whole configuration.
        task: what of the data matters.
        device: see `device_of`; made from the configuration if None.
        speeds: whether to measure segments where the device is this machine; mode `auto` does so anyway.

    Raises:
        PlanDoesNotFit: the step does not fit, with what would.
        UserError: a mistake in the configuration.
    """
    settings = config["activation_checkpointing"]
    check_planned(config)
    check_processes(config)
    device = device_of(config) if device is None else device
    budget = Budget.of(settings.get("budget"), device)
    if settings["mode"] != "auto":
        with tracer_for(config, task, device) as tracer:
            if speeds:
                device = with_speeds(device, tracer, config, task)
                budget = replace(budget, device=device)
            options = {
                key: value for key, value in settings.items() if key not in ("mode", "budget", "audit")
            }
            plan = make_plan(settings["mode"], tracer.segment_names, **options)
            step, baseline = (planned(tracer, device, p) for p in (plan, Plan()))
            report = plan_report(step, baseline, budget, tracer.segment_names)
            if not report["feasible"]:
                planner = AutoPlanner(tracer, device)
                raise PlanDoesNotFit(_misfit(config, step, planner, budget), report)
            return Prediction(plan, step, baseline, budget, report)
    with tracer_for(config, task, device) as tracer:
        device = with_speeds(device, tracer, config, task)
        budget = replace(budget, device=device)
        planner = AutoPlanner(tracer, device, policies_of(settings, device))
        found = planner.at(budget.bytes)
        baseline = planner.planned(Plan())
        if found is None:
            smallest = planner.smallest()
            report = plan_report(smallest, baseline, budget, tracer.segment_names)
            raise PlanDoesNotFit(does_not_fit(planner, budget, lower=lowering(config, device)), report)
        report = plan_report(found, baseline, budget, tracer.segment_names)
        return Prediction(found.plan, found, baseline, budget, report)


def before_training(config: Mapping[str, Any], task: Task) -> dict[str, Any]:
    """The plan and its predicted peak, as plain values for every process of the run.

    Returns:
        `plan` (segment name to policy, in order) and `predicted_peak_bytes`.

    Raises:
        PlanDoesNotFit: the run cannot fit the device.
        UserError: see `predict`.
    """
    if config["activation_checkpointing"]["mode"] != "auto":
        # A budget is what `auto` is to reach, not a limit of the device.
        settings = {**config["activation_checkpointing"], "budget": None}
        config = {**config, "activation_checkpointing": settings}
    prediction = predict(config, task, speeds=False)
    return {
        "plan": {name: str(policy) for name, policy in prediction.plan.items()},
        "predicted_peak_bytes": prediction.report["predicted"]["peak_bytes"],
    }


def is_predicted(config: Mapping[str, Any]) -> bool:
    """Whether `before_training` is called for: `preflight` asks for it, or the mode is `auto`."""
    return bool(config["preflight"]) or config["activation_checkpointing"]["mode"] == "auto"


def maximize_batch(config: Mapping[str, Any], task: Task, device: Device) -> tuple[int, Prediction]:
    """The largest per-device batch for which some plan fits, and that plan.

    Raises:
        PlanDoesNotFit: not even one image does.
    """
    settings = config["activation_checkpointing"]
    budget = Budget.of(settings.get("budget"), device)
    policies, world = policies_of(settings, device), world_size(config["trainer"])
    tracers: list[Tracer] = []

    def planner_for(batch: int) -> AutoPlanner:
        sized = {**config, "batch": {"per_device": batch, "effective": batch * world}}
        tracers.append(tracer_for(sized, task, device))
        return AutoPlanner(tracers[-1], with_speeds(device, tracers[-1], sized, task), policies)

    try:
        largest = largest_batch(planner_for, budget.bytes)
        if largest is None:
            planner = planner_for(1)
            budget = replace(budget, device=planner.device)
            names = tracers[-1].segment_names
            report = plan_report(planner.smallest(), planner.baseline, budget, names)
            raise PlanDoesNotFit(does_not_fit(planner, budget, lower=lowering(config, device)), report)
        planner = planner_for(largest.batch)
        budget = replace(budget, device=planner.device)
        baseline = planner.planned(Plan())
        report = plan_report(largest.step, baseline, budget, tracers[-1].segment_names)
        return largest.batch, Prediction(largest.step.plan, largest.step, baseline, budget, report)
    finally:
        for tracer in tracers:
            tracer.close()


def task_of(config: Mapping[str, Any]) -> Task:
    """Classes and channels of the configured data; `plan.num_classes` in their place, without any data.

    Raises:
        UserError: a data folder that is missing or wrong.
    """
    if config["plan"]["num_classes"] is not None:
        return Task(config["plan"]["num_classes"], config["data"].get("in_channels") or 3, 255)
    data = build_datamodule(config["data"], seed=0, batch_size=1)
    classes = data.class_table
    return Task(len(classes), data.in_channels, classes.ignore_index)


def lowering(config: Mapping[str, Any], device: Device) -> dict[str, str]:
    """Settings that lower the smallest budget further, with what each does."""
    options = {}
    if config["batch"]["per_device"] > 1:
        options["batch.per_device=1"] = "fewer images at once; batch.effective is kept by accumulation"
    height, width = config["data"]["image_size"]
    options[f"data.image_size=[{height // 2},{width // 2}]"] = "smaller crops"
    if not config["activation_checkpointing"].get("offload", True) and device.kind != "cpu":
        options["activation_checkpointing.offload=true"] = "what segments hold waits in host memory"
    if config["loss"].get("strips") not in ("auto", None):
        options["loss.strips=auto"] = "head and loss in strips of rows"
    if config["model"]["head"]["stride"] == 1:
        options["model.head.stride=2"] = "the last decoder block left out"
    if config["optimizer"]["name"] == "adamw":
        if config["strategy"]["name"] != "fsdp":  # which cannot divide them
            options["optimizer=adamw_8bit"] = "moments of 2 bytes a parameter in place of 8"
        options["optimizer=sgd"] = "one moment of 4 bytes a parameter in place of 8"
    if config["strategy"]["name"] != "fsdp":
        options["strategy=fsdp trainer.devices=N"] = "parameters, gradients and moments divided by N"
    return options


def policies_of(settings: Mapping[str, Any], device: Device) -> tuple[Policy, ...]:
    """What `auto` may choose from, beside keeping."""
    # The memory of a CPU is the host's: nothing is gained by a copy in it.
    offload = (Policy.OFFLOAD,) if settings.get("offload", True) and device.kind != "cpu" else ()
    return (Policy.SELECTIVE, Policy.RECOMPUTE, *offload)


def tracer_for(config: Mapping[str, Any], task: Task, device: Device) -> Tracer:
    """A tracer of the configured step, by the rules of the device."""
    return Tracer(
        build_step, dict(config), task.num_classes, task.in_channels, task.ignore_index, rules=device.kind
    )


def planned(tracer: Tracer, device: Device, plan: Plan) -> PlannedStep:
    """The trace of a plan, and its time."""
    trace = tracer.trace(plan)
    return PlannedStep(plan, trace, step_seconds(trace, device))


def _misfit(config: Mapping[str, Any], step: PlannedStep, planner: AutoPlanner, budget: Budget) -> str:
    mode = config["activation_checkpointing"]["mode"]
    need = f"activation_checkpointing={mode} needs {gib(step.trace.peak_bytes)}"
    better = planner.at(budget.bytes)
    if better is None:
        return f"{need}. {does_not_fit(planner, budget, lower=lowering(config, budget.device))}"
    return (
        f"{need}, and {gib(budget.bytes)} are there. {budget.bound} activation_checkpointing=auto fits: "
        f"{gib(better.trace.peak_bytes)}, at {better.seconds / step.seconds:.2f} times its time."
    )
