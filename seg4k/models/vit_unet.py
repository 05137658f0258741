"""ViT-U-Net: a plain vision transformer, a neck and a U-Net decoder, as an ordered set of segments."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seg4k.errors import UserError
from seg4k.models.decoder import DecoderBlock
from seg4k.models.encoder import ViTEncoder, build_encoder
from seg4k.models.neck import ImageLevel, NeckLevel, TokensToMap, doublings
from seg4k.models.sizes import crop

STEM_CHANNELS = 32
STRIDES = (8, 4, 2, 1)  # of the outputs of the decoder blocks


class Step(NamedTuple):
    """One segment of the forward pass and the names of the values that it takes, in order."""

    name: str
    module: nn.Module
    inputs: tuple[str, ...]


class ViTUNet(nn.Module):
    """Semantic segmentation of images of any size.

    The forward pass is a loop over `steps()`: patch embedding, four encoder stages, and each neck level just
    before the decoder block that takes it, so that few skips are alive at once. Nothing here knows of
    activation checkpointing; `segments()` is all that it needs.

    Args:
        encoder: see `build_encoder`.
        num_classes: channels of the logits.
        in_channels: channels of the image.
        decoder_channels: of the four decoder blocks, from the coarsest on.
        norm: `batch` or `group`, in neck and decoder.
        head_stride: 1, 2 or 4, the stride of the features that the head takes. Above 1 the last decoder
            blocks are left out and the logits are upsampled bilinearly: less memory for coarser edges.
    """

    def __init__(
        self,
        encoder: ViTEncoder,
        num_classes: int,
        *,
        in_channels: int = 3,
        decoder_channels: Sequence[int] = (256, 128, 64, 32),
        norm: str = "batch",
        head_stride: int = 1,
    ) -> None:
        super().__init__()
        from segmentation_models_pytorch.base import initialization

        if len(decoder_channels) != 4:
            raise UserError(
                f"model.decoder.channels={list(decoder_channels)}: give four numbers, one per block"
            )
        if head_stride not in (1, 2, 4):
            raise UserError(f"model.head.stride={head_stride}: choose 1, 2 or 4")
        self.head_stride = head_stride
        self.strides = strides = tuple(stride for stride in STRIDES if stride >= head_stride)
        dim, prefix, patch = encoder.embed_dim, encoder.prefix_tokens, min(encoder.patch_size)
        self.encoder = encoder
        self.num_classes = num_classes
        self.neck = nn.ModuleDict(
            {
                "stride16": TokensToMap(prefix),
                "stride8": NeckLevel(dim, dim // 2, doublings(patch, 8), prefix, norm),
                "stride4": NeckLevel(dim, dim // 4, doublings(patch, 4), prefix, norm),
            }
        )
        if 2 in strides:
            self.neck["stride2"] = ImageLevel(in_channels, STEM_CHANNELS, norm)
        skips = (dim // 2, dim // 4, STEM_CHANNELS, 0)
        inputs = (dim, *decoder_channels[:3])
        self.decoder = nn.ModuleDict(
            {
                f"block{index}": DecoderBlock(inputs[index], skips[index], decoder_channels[index], norm)
                for index in range(len(strides))
            }
        )
        self.head = nn.Conv2d(decoder_channels[len(strides) - 1], num_classes, kernel_size=3, padding=1)
        initialization.initialize_decoder(self.neck)
        initialization.initialize_decoder(self.decoder)
        initialization.initialize_head(self.head)
        self.register_buffer("mean", torch.tensor(encoder.mean).view(1, -1, 1, 1))
        self.register_buffer("std", torch.tensor(encoder.std).view(1, -1, 1, 1))

    def forward(self, image: Tensor) -> Tensor:
        """Logits (B, classes, H, W) of an image (B, C, H, W), float in [0, 1] or uint8."""
        height, width = image.shape[-2:]
        logits = self.head(self.forward_features(image))
        if self.head_stride > 1:
            # In fp32, as the strips of the loss take it: in bf16 the interpolation would round.
            logits = F.interpolate(
                logits.float(), scale_factor=self.head_stride, mode="bilinear", align_corners=False
            )
        return crop(cast(Tensor, logits), height, width)

    def forward_features(self, image: Tensor) -> Tensor:
        """Features (B, F, H', W') for the head: the image's size in whole patches over `head_stride`."""
        image = self.preprocess(image)
        height, width = image.shape[-2:]
        rows, columns = height // self.encoder.patch_size[0], width // self.encoder.patch_size[1]
        values: dict[str, Any] = {"image": image, "rows": rows, "columns": columns, "none": None}
        for stride in (1, 2, 4, 8):
            values[f"height/{stride}"] = -(-height // stride)
            values[f"width/{stride}"] = -(-width // stride)
        frozen = self.encoder.frozen_modules()
        with torch.no_grad() if frozen else nullcontext():
            values["rope"] = self.encoder.rotary_embedding((rows, columns))
        steps = self.steps()
        last_use = {name: index for index, step in enumerate(steps) for name in step.inputs}
        result = image
        for index, step in enumerate(steps):
            with torch.no_grad() if any(step.module is module for module in frozen) else nullcontext():
                result = step.module(*(values[name] for name in step.inputs))
            values[step.name] = result
            # Let go of what nothing later takes: without autograd that is all that keeps it alive.
            for name in {*step.inputs, step.name}:
                if last_use.get(name, -1) <= index:
                    values.pop(name, None)
        return result

    def preprocess(self, image: Tensor) -> Tensor:
        """Scale to [0, 1], normalise, pad to whole patches.

        The result has autocast's dtype where it is on: both readers would cast to it, each to its own copy.
        """
        mean, std = cast(Tensor, self.mean), cast(Tensor, self.std)
        if image.ndim != 4 or image.shape[1] != mean.shape[1]:
            raise UserError(
                f"the model takes images (B, {mean.shape[1]}, H, W), not {tuple(image.shape)}; "
                "give images of the channels that it was trained on"
            )
        if not image.is_floating_point():
            if image.dtype != torch.uint8:
                raise UserError(
                    f"integer images must be uint8, not {image.dtype}; scale others to floats in [0, 1]"
                )
            image = image.to(mean.dtype) / 255
        image = (image - mean) / std
        height, width = image.shape[-2:]
        patch_height, patch_width = self.encoder.patch_size
        image = F.pad(image, (0, -width % patch_width, 0, -height % patch_height))
        if torch.is_autocast_enabled(image.device.type):
            image = image.to(torch.get_autocast_dtype(image.device.type))
        return image

    def steps(self) -> list[Step]:
        """The forward pass up to the head: top-level segments in order, with the values that each takes."""
        stages = [f"encoder.stage{index}" for index in range(4)]
        steps = [Step("encoder.patch_embed", self.encoder.patch_embed, ("image",))]
        before = "encoder.patch_embed"
        for name, stage in zip(stages, self.encoder.stages, strict=True):
            steps.append(Step(name, stage, (before, "rope")))
            before = name
        grid = ("rows", "columns")
        sources = {
            "stride16": (stages[3], *grid),
            "stride8": (stages[2], *grid, "height/8", "width/8"),
            "stride4": (stages[1], *grid, "height/4", "width/4"),
            "stride2": ("image",),
        }
        neck = {name: Step(f"neck.{name}", module, sources[name]) for name, module in self.neck.items()}
        steps.append(neck["stride16"])
        before = "neck.stride16"
        for index, stride in enumerate(self.strides):
            skip = "none"
            if stride > 1:
                steps.append(neck[f"stride{stride}"])
                skip = f"neck.stride{stride}"
            name = f"decoder.block{index}"
            inputs = (before, f"height/{stride}", f"width/{stride}", skip)
            steps.append(Step(name, self.decoder[f"block{index}"], inputs))
            before = name
        return steps

    def segments(self) -> dict[str, nn.Module]:
        """Every module that may be recomputed as one, in forward order; nested ones after their parent."""
        nested = {f"encoder.{name}": module for name, module in self.encoder.segments().items()}
        found: dict[str, nn.Module] = {}
        for step in self.steps():
            found[step.name] = step.module
            found |= {name: module for name, module in nested.items() if name.startswith(f"{step.name}.")}
            if isinstance(step.module, DecoderBlock):
                found[f"{step.name}.conv1"] = step.module.conv1
                found[f"{step.name}.conv2"] = step.module.conv2
        return {**found, "head": self.head}

    def parameters_by_depth(self) -> Iterator[tuple[int, str, nn.Parameter]]:
        """Each parameter with its depth: 0 the embedding, `encoder.depth + 1` neck, decoder and head."""
        for name, parameter in self.named_parameters():
            inside = name.startswith("encoder.")
            depth = self.encoder.depth_of(name.removeprefix("encoder.")) if inside else self.encoder.depth + 1
            yield depth, name, parameter


def build_model(
    config: Mapping[str, Any], *, num_classes: int, image_size: tuple[int, int], in_channels: int = 3
) -> ViTUNet:
    """A `ViTUNet` from the `model` group of the configuration.

    Args:
        config: `encoder` (name, weights, frozen, drop_path, dropout), `decoder` (channels, norm) and `head`
            (stride), as conf/model/vit_unet.yaml documents them.
        num_classes: channels of the logits.
        image_size: (H, W) in pixels of the training images; others work too.
        in_channels: channels of the images.

    Raises:
        UserError: see `build_encoder`.
    """
    encoder = dict(config["encoder"])
    return ViTUNet(
        build_encoder(encoder.pop("name"), image_size=image_size, in_channels=in_channels, **encoder),
        num_classes,
        in_channels=in_channels,
        decoder_channels=config["decoder"]["channels"],
        norm=config["decoder"]["norm"],
        head_stride=config["head"]["stride"],
    )
