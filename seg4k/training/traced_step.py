"""The configured training step as `seg4k.memory` traces it: same model, loss and optimizer, no data."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from seg4k.losses.build import build_loss, strip_options
from seg4k.losses.strips import strip_loss
from seg4k.memory.step import Batch, Step
from seg4k.models.vit_unet import ViTUNet, build_model
from seg4k.training.eight_bit import Footprint
from seg4k.training.optimizers import build_optimizer
from seg4k.training.sharding import shard
from seg4k.training.strategies import world_size


def build_step(config: Mapping[str, Any], num_classes: int, in_channels: int, ignore_index: int) -> Step:
    """Describe one optimizer step of a configuration; nothing of it takes memory or needs weights.

    Args:
        config: the whole configuration.
        num_classes: channels of the logits.
        in_channels: channels of the images.
        ignore_index: the label that counts for nothing.
    """
    settings = {**config["model"], "encoder": {**config["model"]["encoder"], "weights": "random"}}
    height, width = config["data"]["image_size"]
    with torch.device("meta"):
        model = build_model(
            settings, num_classes=num_classes, image_size=(height, width), in_channels=in_channels
        )
    double = config["precision"] == "fp64"
    if double:
        model.double()
    loss = build_loss(config["loss"], num_classes, ignore_index)
    strips, strip_bytes = strip_options(config["loss"])

    def compute(model: nn.Module, batch: Batch) -> Tensor:
        assert isinstance(model, ViTUNet)
        return strip_loss(
            model.forward_features(batch["image"]),
            model.head,
            batch["mask"],
            loss,
            strips,
            upsample=model.head_stride,
            strip_bytes=strip_bytes,
        )

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        assert isinstance(model, ViTUNet)
        parameters = list(model.parameters_by_depth())
        if config["optimizer"]["name"] == "adamw_8bit":
            return Footprint([{"params": [entry[2] for entry in parameters if entry[2].requires_grad]}])
        return build_optimizer(config["optimizer"], parameters)

    count, world, strategy = config["batch"]["per_device"], world_size(config["trainer"]), config["strategy"]
    sharded = strategy["name"] == "fsdp"
    return Step(
        model=model.train(),
        loss=compute,
        optimizer=optimizer,
        batch={
            "image": ((count, in_channels, height, width), torch.uint8),
            "mask": ((count, height, width), torch.int64),
        },
        precision="fp32" if double else config["precision"],  # without autocast
        modules=(loss,),
        accumulate=max(1, config["batch"]["effective"] // (count * world)),
        clip=config["trainer"]["gradient_clip"] or None,
        copies=1 if config["trainer"]["ema_decay"] > 0 else 0,
        is_first=config["trainer"]["max_steps"] == 1,
        processes=world,
        shard=partial(shard, reshard_after_forward=strategy["reshard_after_forward"]) if sharded else None,
        buckets=strategy["name"] == "ddp" and world > 1,
        state_on_host=bool(strategy.get("cpu_offload")),
    )
