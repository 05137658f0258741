"""Optimizers with layer-wise learning-rate decay, and the schedule over optimizer steps."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from seg4k.errors import UserError
from seg4k.training.eight_bit import adamw_8bit

# Not decayed whatever their shape: a norm's scale, a bias, and tokens that are added rather than multiplied.
UNDECAYED = ("pos_embed", "cls_token", "reg_token", "gamma", "freqs")


def parameter_groups(
    parameters: Iterable[tuple[int, str, nn.Parameter]], *, lr: float, weight_decay: float, layer_decay: float
) -> list[dict[str, Any]]:
    """Group trainable parameters by depth and by whether they are decayed.

    Args:
        parameters: (depth, name, parameter) as `ViTUNet.parameters_by_depth` gives them.
        lr: learning rate at the greatest depth (neck, decoder, head).
        weight_decay: of matrices and kernels; norms, biases, embeddings and tokens have none.
        layer_decay: the rate at depth d is `lr * layer_decay ** max(0, depth - 1 - d)`, so that the last
            encoder block learns at the full rate (BEiT, arXiv 2106.08254).

    Returns:
        Groups in a fixed order, each with `params`, `lr`, `weight_decay` and a `name`.
    """
    trainable = [entry for entry in parameters if entry[2].requires_grad]
    if not trainable:
        raise UserError("no parameter is trainable: model.encoder.frozen leaves nothing to learn")
    deepest = max(depth for depth, _, _ in trainable)
    groups: dict[tuple[int, bool], dict[str, Any]] = {}
    for depth, name, parameter in trainable:
        decayed = parameter.ndim > 1 and not any(part in name for part in UNDECAYED)
        group = groups.setdefault(
            (depth, decayed),
            {
                "params": [],
                "lr": float(lr * layer_decay ** max(0, deepest - 1 - depth)),
                "weight_decay": weight_decay if decayed else 0.0,
                "name": f"depth{depth}{'' if decayed else '_undecayed'}",
            },
        )
        group["params"].append(parameter)
    return [groups[key] for key in sorted(groups)]


def build_optimizer(
    config: Mapping[str, Any], parameters: Iterable[tuple[int, str, nn.Parameter]]
) -> torch.optim.Optimizer:
    """Make the optimizer of the `optimizer` group of the configuration.

    Raises:
        UserError: an unknown name, or a learning rate that is not positive.
    """
    if not config["lr"] > 0:
        raise UserError(f"optimizer.lr={config['lr']}: give a positive learning rate")
    groups = parameter_groups(
        parameters,
        lr=config["lr"],
        weight_decay=config["weight_decay"],
        layer_decay=config["layer_decay"],
    )
    if config["name"] == "adamw":
        return torch.optim.AdamW(groups, lr=config["lr"], betas=tuple(config["betas"]))
    if config["name"] == "sgd":
        momentum = config["momentum"]
        return torch.optim.SGD(groups, lr=config["lr"], momentum=momentum, nesterov=momentum > 0)
    if config["name"] == "adamw_8bit":
        return adamw_8bit(groups, lr=config["lr"], betas=(config["betas"][0], config["betas"][1]))
    raise UserError(f"optimizer.name={config['name']}: choose adamw, adamw_8bit or sgd")


def state_in_model_order(
    state: Mapping[str, Any], optimizer: torch.optim.Optimizer, model: nn.Module
) -> dict[str, Any]:
    """The state of an optimizer with its parameters numbered as the model has them, not as the groups do.

    torch loads it all the same, group by group. A sharded strategy goes by the numbers, and takes them for
    those of the model: moments would go to the wrong parameters.

    Args:
        state: of the optimizer's `state_dict`.
        optimizer: what it was taken from.
        model: has all of its parameters.
    """
    places = {parameter: number for number, parameter in enumerate(model.parameters())}
    numbers = [places[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    return {
        **state,
        "state": {numbers[number]: value for number, value in state["state"].items()},
        "param_groups": [
            {**group, "params": [numbers[number] for number in group["params"]]}
            for group in state["param_groups"]
        ],
    }


def group_settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """A copy of what each group is set to: all but its parameters and the rate of the moment."""
    return [
        deepcopy({key: value for key, value in group.items() if key not in ("params", "lr")})
        for group in optimizer.param_groups
    ]


def apply_group_settings(
    optimizer: torch.optim.Optimizer, scheduler: LambdaLR, settings: Sequence[Mapping[str, Any]]
) -> None:
    """Set the groups and the base rates of the schedule to `settings`, and the rates to what follows.

    A state that was loaded has brought those of the run that saved it. Where these are the same, no bit
    changes.

    Args:
        optimizer: its groups are those that the settings were taken from.
        scheduler: of the optimizer, at the step to go on from.
        settings: see `group_settings`; taken when the schedule was there, which adds `initial_lr`.
    """
    scheduler.base_lrs = [deepcopy(one["initial_lr"]) for one in settings]
    for group, one, factor in zip(optimizer.param_groups, settings, scheduler.lr_lambdas, strict=True):
        group.update(deepcopy(dict(one)))
        rate = one["initial_lr"] * factor(scheduler.last_epoch)
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def schedule(config: Mapping[str, Any], max_steps: int) -> Callable[[int], float]:
    """Make the factor on the learning rate as a function of the optimizer step, counted from 0.

    Raises:
        UserError: an unknown name, or negative warm-up.
    """
    name, final = config["name"], config["final_ratio"]
    if name not in ("cosine", "polynomial"):
        raise UserError(f"schedule.name={name}: choose cosine or polynomial")
    if config["warmup_steps"] < 0:
        raise UserError(f"schedule.warmup_steps={config['warmup_steps']}: give 0 or more")
    warmup = min(config["warmup_steps"], max_steps)

    def factor(step: int) -> float:
        if step < warmup:
            return float((step + 1) / warmup)
        progress = min(1.0, (step - warmup) / max(1, max_steps - warmup))
        if name == "cosine":
            shape = 0.5 * (1 + math.cos(math.pi * progress))
        else:
            shape = float((1 - progress) ** config["power"])
        return float(final + (1 - final) * shape)

    return factor
