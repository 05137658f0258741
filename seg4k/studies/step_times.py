"""Step times of several modes on the same model and batch, alternating: the slowdown and nothing else."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import seed_everything

from seg4k.activation_checkpointing import apply_activation_checkpointing, make_plan
from seg4k.data.build import build_datamodule
from seg4k.errors import UserError
from seg4k.files import write_json, write_text
from seg4k.losses.build import build_loss, strip_options
from seg4k.losses.strips import strip_loss
from seg4k.models.vit_unet import build_model
from seg4k.studies.speed import interleaved_timing
from seg4k.training.optimizers import build_optimizer
from seg4k.training.ranges import check_ranges
from seg4k.training.run_card import code_state, device_state, environment, finite

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def time_modes(config: Mapping[str, Any], directory: Path, command: str) -> dict[str, Any]:
    """Time whole training steps (forward, backward, optimizer) of each mode of `speed.modes`.

    All modes share one model, one optimizer and one batch; only the plan changes between them, before the
    clock starts. The audit is off: it belongs to the first step of a run, not to its speed.

    Args:
        config: the whole configuration.
        directory: where `speed.json` and `speed.md` are written.
        command: the command as it was typed.

    Returns:
        What `speed.json` holds: `interleaved_timing`'s result with hardware, versions and command.

    Raises:
        UserError: a mistake in the configuration.
    """
    check_ranges(config)
    if config["precision"] not in DTYPES:
        raise UserError(f"precision={config['precision']}: experiment=speed times fp32 or bf16")
    device = torch.device("cuda" if _wants_cuda(config["trainer"]["accelerator"]) else "cpu")
    seed_everything(config["seed"], workers=True, verbose=False)
    data = build_datamodule(config["data"], seed=config["seed"], batch_size=config["batch"]["per_device"])
    data.prepare_data()
    data.setup("fit")
    classes = data.class_table
    model = build_model(
        config["model"],
        num_classes=len(classes),
        image_size=tuple(config["data"]["image_size"]),
        in_channels=data.in_channels,
    ).to(device)
    loss = build_loss(config["loss"], len(classes), classes.ignore_index).to(device)
    strips, strip_bytes = strip_options(config["loss"])
    optimizer = build_optimizer(config["optimizer"], model.parameters_by_depth())
    batch = next(iter(data.train_dataloader()))
    image, mask = batch["image"].to(device), batch["mask"].to(device)
    autocast = config["precision"] != "fp32"

    def step() -> None:
        with torch.autocast(device.type, DTYPES[config["precision"]], enabled=autocast):
            features = model.forward_features(image)
            value = strip_loss(
                features,
                model.head,
                mask,
                loss,
                strips,
                upsample=model.head_stride,
                strip_bytes=strip_bytes,
            )
        value.backward()  # type: ignore[no-untyped-call, unused-ignore]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    names = list(model.segments())
    plans = {mode: make_plan(mode, names) for mode in config["speed"]["modes"]}

    def arm(mode: str) -> Callable[[], None]:
        def run() -> None:
            apply_activation_checkpointing(model.train(), plans[mode], audit="off")
            step()

        return run

    timing = interleaved_timing(
        {mode: arm(mode) for mode in plans},
        warmup=config["speed"]["warmup"],
        repeats=config["speed"]["repeats"],
    )
    result = {
        "command": command,
        "config": dict(config),
        "code": code_state(),
        "environment": environment(),
        "device": device_state(device.type, device.index, 1),
        **timing,
    }
    write_json(directory / "speed.json", finite(result))
    write_text(directory / "speed.md", render(result))
    print(render(result))
    return result


def render(result: Mapping[str, Any]) -> str:
    """The times as a Markdown table."""
    lines = [
        f"# Step times on {result['device']['name']}",
        "",
        f"`{result['command']}`: median of {result['repeats']} after {result['warmup']} rounds of warm-up, "
        f"the modes alternating; ratio to `{result['baseline']}` within each round.",
        "",
        "| mode | seconds a step | quartiles | time ratio | quartiles |",
        "| --- | --- | --- | --- | --- |",
    ]
    for mode, arm in result["arms"].items():
        if arm["median_seconds"] is None:
            lines.append(f"| {mode} | {arm['status'].replace('_', ' ')} | | | |")
            continue
        low, high = arm["iqr_seconds"]
        ratio = "" if arm["ratio"] is None else f"{arm['ratio']:.3f}"
        spread = "" if arm["ratio_iqr"] is None else f"{arm['ratio_iqr'][0]:.3f} to {arm['ratio_iqr'][1]:.3f}"
        lines.append(
            f"| {mode} | {arm['median_seconds']:.3f} | {low:.3f} to {high:.3f} | {ratio} | {spread} |"
        )
    return "\n".join(lines) + "\n"


def _wants_cuda(accelerator: str) -> bool:
    if accelerator == "gpu" and not torch.cuda.is_available():
        raise UserError("trainer.accelerator=gpu: no CUDA device is there; set trainer.accelerator=cpu")
    return accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
