"""From a configuration to a plan and what it will cost, before anything is trained."""

import base64
import io
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from seg4k.activation_checkpointing import Plan, Policy, make_plan
from seg4k.data.build import build_datamodule
from seg4k.errors import PlanDoesNotFit, UserError
from seg4k.memory.auto import AutoPlanner, PlannedStep
from seg4k.memory.costs import step_seconds
from seg4k.memory.devices import Device, device_from_dict, this_device
from seg4k.memory.ledger import Reading
from seg4k.memory.preflight import cheapest_changes, does_not_fit, largest_batch, what_led
from seg4k.memory.report import plan_report, print_report, save_picture
from seg4k.memory.tracer import Tracer
from seg4k.training.traced_step import build_step

UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
LOWER = {
    "batch.per_device": "fewer images at once, batch.effective is kept by accumulation",
    "data.image_size": "smaller crops",
    "model.head.stride=2": "the last decoder block left out",
    "optimizer=sgd": "one moment in place of two",
}


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
    report: Mapping[str, Any]


def parse_bytes(value: int | float | str, where: str) -> int:
    """Bytes from a number, or from words such as `24GiB` or `500 MB`.

    Raises:
        UserError: anything else, or nothing at all.
    """
    found = re.fullmatch(r"\s*([0-9.]+)\s*([a-zA-Z]*)\s*", str(value))
    if not found or found[2].upper() not in UNITS or found[1].count(".") > 1:
        raise UserError(f"{where}={value}: give bytes, or a number and a unit, such as 24GiB")
    size = int(float(found[1]) * UNITS[found[2].upper()])
    if size <= 0:
        raise UserError(f"{where}={value}: give more than nothing")
    return size


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


def predict(config: Mapping[str, Any], task: Task, *, device: Device | None = None) -> Prediction:
    """Trace the configured step, and in mode `auto` find its plan.

    Args:
        config: the whole configuration.
        task: what of the data matters.
        device: see `device_of`; made from the configuration if None.

    Raises:
        PlanDoesNotFit: the step does not fit, with what would.
        UserError: a mistake in the configuration.
    """
    settings = config["activation_checkpointing"]
    device = device_of(config) if device is None else device
    budget = _budget(settings, device)
    if settings["mode"] != "auto":
        with _tracer(config, task, device) as tracer:
            options = {key: value for key, value in settings.items() if key not in ("mode", "audit")}
            plan = make_plan(settings["mode"], tracer.segment_names, **options)
            step, baseline = (_planned(tracer, device, p) for p in (plan, Plan()))
            report = plan_report(step, baseline, device, budget, tracer.segment_names)
            if not report["feasible"]:
                planner = AutoPlanner(tracer, device)
                raise PlanDoesNotFit(_misfit(settings["mode"], step, planner, budget), report)
            return Prediction(plan, step, report)
    with _tracer(config, task, device) as tracer:
        planner = AutoPlanner(tracer, device, _policies(settings))
        found = planner.at(budget)
        baseline = planner.planned(Plan())
        if found is None:
            smallest = planner.smallest()
            report = plan_report(smallest, baseline, device, budget, tracer.segment_names)
            raise PlanDoesNotFit(does_not_fit(planner, budget, lower=LOWER), report)
        report = plan_report(found, baseline, device, budget, tracer.segment_names)
        return Prediction(found.plan, found, report)


def before_training(config: Mapping[str, Any], task: Task) -> Prediction | None:
    """The plan and its cost where `preflight` asks for it, or the mode is `auto`; None otherwise.

    Raises:
        PlanDoesNotFit: the run cannot fit the device.
        UserError: see `predict`.
    """
    automatic = config["activation_checkpointing"]["mode"] == "auto"
    if not (automatic or config["preflight"]):
        return None
    if automatic and config["device"]["name"] == "this" and config["trainer"]["devices"] != 1:
        # Each process would measure its own speed and might choose a plan of its own.
        raise UserError("activation_checkpointing=auto on several devices: name them, such as device=a100-80")
    return predict(config, task)


def after_out_of_memory(config: Mapping[str, Any], memory: Mapping[str, Any]) -> str:
    """What took the memory when it ran out, and the three cheapest changes that would fit, by trace.

    Args:
        config: of the run.
        memory: of its card.
    """
    device, task = device_of(config), task_of(config)
    parts = memory.get("breakdown") or {}
    reading = Reading(memory["peak_bytes"], memory["peak_source"] or "", memory["reserved_bytes"])
    led = what_led(reading, parts.get("optimizer", 0), memory["static_bytes"] or 0)
    per_device = config["batch"]["per_device"]
    changes: dict[str, dict[str, Any]] = {
        f"activation_checkpointing={mode}": {"activation_checkpointing": {"mode": mode, "audit": "off"}}
        for mode in ("selective", "stage", "block")
        if mode != config["activation_checkpointing"]["mode"]
    }
    if per_device > 1:
        changes[f"batch.per_device={per_device // 2}"] = {
            "batch": {**config["batch"], "per_device": per_device // 2}
        }
    if config["model"]["head"]["stride"] == 1:
        changes["model.head.stride=2"] = {"model": {**config["model"], "head": {"stride": 2}}}
    steps = {}
    for name, change in changes.items():
        changed = {**config, **change}
        settings = changed["activation_checkpointing"]
        mode = settings["mode"] if settings["mode"] != "auto" else "selective"
        with _tracer(changed, task, device) as tracer:
            plan = make_plan(mode, tracer.segment_names, path=settings.get("path"))
            steps[name] = _planned(tracer, device, plan)
    now = max(steps.values(), key=lambda step: step.trace.peak_bytes)
    fitting = cheapest_changes(steps, _budget(config["activation_checkpointing"], device), now)
    if not fitting:
        return f"{led} None of {', '.join(changes)} alone would fit; seg4k plan tells what does."
    return f"{led} What would fit, the cheapest first: {'; '.join(fitting)}."


def maximize_batch(config: Mapping[str, Any], task: Task, device: Device) -> tuple[int, Prediction]:
    """The largest per-device batch for which some plan fits, and that plan.

    Raises:
        PlanDoesNotFit: not even one image does.
    """
    settings = config["activation_checkpointing"]
    budget = _budget(settings, device)
    policies = _policies(settings)
    tracers: list[Tracer] = []

    def planner_for(batch: int) -> AutoPlanner:
        sized = {**config, "batch": {"per_device": batch, "effective": batch}}
        tracers.append(_tracer(sized, task, device))
        return AutoPlanner(tracers[-1], device, policies)

    try:
        largest = largest_batch(planner_for, budget)
        if largest is None:
            raise PlanDoesNotFit(does_not_fit(planner_for(1), budget, lower=LOWER), {})
        planner = planner_for(largest.batch)
        baseline = planner.planned(Plan())
        report = plan_report(largest.step, baseline, device, budget, tracers[-1].segment_names)
        return largest.batch, Prediction(largest.step.plan, largest.step, report)
    finally:
        for tracer in tracers:
            tracer.close()


def answer(config: Mapping[str, Any]) -> dict[str, Any]:
    """What `seg4k plan` says, as plain values that can be kept and said again.

    Returns:
        `report` (plan.json), `text`, `picture` (a PNG in base64, empty where nothing was traced), `message`
        (why nothing fits, empty where something does).
    """
    device = device_of(config)
    task = task_of(config)
    console = Console(record=True, width=110, file=io.StringIO())
    try:
        if config["plan"]["maximize"] == "batch":
            batch, prediction = maximize_batch(config, task, device)
            console.print(f"The largest batch per device that fits: {batch}", highlight=False)
        elif config["plan"]["maximize"] is None:
            prediction = predict(config, task, device=device)
        else:
            raise UserError(f"plan.maximize={config['plan']['maximize']}: choose batch or null")
    except PlanDoesNotFit as error:
        return {"report": dict(error.report), "text": "", "picture": "", "message": str(error)}
    print_report(prediction.report, prediction.step.trace, device, console)
    with tempfile.TemporaryDirectory() as folder:
        picture = Path(folder) / "memory.png"
        save_picture(prediction.step.trace, picture, budget=prediction.report["budget_bytes"])
        encoded = base64.b64encode(picture.read_bytes()).decode()
    return {
        "report": dict(prediction.report),
        "text": console.export_text(),
        "picture": encoded,
        "message": "",
    }


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


def _budget(settings: Mapping[str, Any], device: Device) -> int:
    budget = settings.get("budget")
    return device.budget_bytes if budget is None else parse_bytes(budget, "activation_checkpointing.budget")


def _policies(settings: Mapping[str, Any]) -> tuple[Policy, ...]:
    offload = (Policy.OFFLOAD,) if settings.get("offload", True) else ()
    return (Policy.SELECTIVE, Policy.RECOMPUTE, *offload)


def _tracer(config: Mapping[str, Any], task: Task, device: Device) -> Tracer:
    return Tracer(
        build_step, dict(config), task.num_classes, task.in_channels, task.ignore_index, rules=device.kind
    )


def _planned(tracer: Tracer, device: Device, plan: Plan) -> PlannedStep:
    trace = tracer.trace(plan)
    return PlannedStep(plan, trace, step_seconds(trace, device))


def _misfit(mode: str, step: PlannedStep, planner: AutoPlanner, budget: int) -> str:
    need = f"activation_checkpointing={mode} needs {step.trace.peak_bytes / 2**30:.2f} GiB"
    better = planner.at(budget)
    if better is None:
        return f"{need}. {does_not_fit(planner, budget, lower=LOWER)}"
    return (
        f"{need}, and {budget / 2**30:.2f} GiB are there. activation_checkpointing=auto fits: "
        f"{better.trace.peak_bytes / 2**30:.2f} GiB, at {better.seconds / step.seconds:.2f} times its time."
    )
