"""What `seg4k plan` answers: a report, tables and a picture, as plain values that can be kept."""

import base64
import io
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from seg4k.errors import PlanDoesNotFit, UserError
from seg4k.memory.report import print_report, save_picture
from seg4k.training.plan_checks import check_planned
from seg4k.training.planning import device_of, maximize_batch, predict, task_of


def answer(config: Mapping[str, Any]) -> dict[str, Any]:
    """What `seg4k plan` says, as plain values that can be kept and said again.

    Returns:
        `report` (plan.json), `text`, `picture` (a PNG in base64, empty where nothing was traced), `message`
        (why nothing fits, empty where something does).
    """
    check_planned(config)
    device = device_of(config)
    task = task_of(config)
    console = Console(record=True, width=100, file=io.StringIO())
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
    traces = prediction.step.trace, prediction.baseline.trace
    print_report(prediction.report, *traces, prediction.budget, console)
    with tempfile.TemporaryDirectory() as folder:
        picture = Path(folder) / "memory.png"
        save_picture(prediction.step.trace, picture, budget=prediction.budget.bytes)
        encoded = base64.b64encode(picture.read_bytes()).decode()
    return {
        "report": dict(prediction.report),
        "text": console.export_text(),
        "picture": encoded,
        "message": "",
    }
