"""A timm vision transformer, its blocks regrouped into four stages."""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from seg4k.errors import UserError
from seg4k.models.pretrained import load_timm_weights, pretrained

STAGES = 4


class PatchEmbedding(nn.Module):
    """Image to tokens: patch embedding, class and register tokens, position embedding.

    `stem` is the timm model without its blocks, final norm, rotary embedding and head, so that timm's own
    code adds the position embedding (resampled only where the size is not the one it was built for).
    """

    def __init__(self, stem: nn.Module) -> None:
        super().__init__()
        self.stem = stem

    def forward(self, image: Tensor) -> Tensor:
        """Image (B, C, H, W), H and W multiples of the patch, to tokens (B, N, D)."""
        stem = cast(Any, self.stem)
        tokens = stem._pos_embed(stem.patch_embed(image))
        if isinstance(tokens, tuple):  # EVA gives (tokens, rotary embedding); ours is made in ViTEncoder
            tokens = tokens[0]
        return cast(Tensor, stem.norm_pre(tokens))


class EncoderStage(nn.Module):
    """Consecutive transformer blocks, and after the last of the encoder its final norm."""

    def __init__(
        self, blocks: Sequence[nn.Module], norm: nn.Module, first: int, rope_per_block: bool
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm
        self.first = first
        self.rope_per_block = rope_per_block

    def forward(self, tokens: Tensor, rope: Tensor | None = None) -> Tensor:
        """Tokens (B, N, D) to tokens (B, N, D); `rope` (N', R), or (depth, heads, N', R) where learned."""
        if rope is not None and self.rope_per_block:
            for index, block in enumerate(self.blocks, start=self.first):
                tokens = block(tokens, rope[index])
        else:  # without a look at `first`, so that equal stages share one compiled graph
            shared = () if rope is None else (rope,)
            for block in self.blocks:
                tokens = block(tokens, *shared)
        return cast(Tensor, self.norm(tokens))


class ViTEncoder(nn.Module):
    """Any timm `VisionTransformer` or EVA-type model as patch embedding and four stages.

    Args:
        vit: the timm model. It is taken apart: do not use it afterwards.
        mean: per channel, in units of the image scaled to [0, 1].
        std: likewise.
        frozen: how many stages from the image on are frozen: `STAGES` all of them, 0 none. A frozen stage
            includes the patch embedding; it is in eval mode and its parameters take no gradient.
    """

    def __init__(self, vit: nn.Module, mean: Sequence[float], std: Sequence[float], frozen: int = 0) -> None:
        super().__init__()
        parts = cast(Any, vit)
        self.patch_size: tuple[int, int] = tuple(parts.patch_embed.patch_size)
        self.grid_size: tuple[int, int] = tuple(parts.patch_embed.grid_size)
        self.prefix_tokens: int = parts.num_prefix_tokens
        self.embed_dim: int = parts.embed_dim
        self.mean, self.std = tuple(mean), tuple(std)
        self.frozen = frozen

        blocks = list(parts.blocks)
        if len(blocks) < STAGES:
            raise UserError(
                f"model.encoder.name: an encoder of {len(blocks)} blocks cannot make {STAGES} stages"
            )
        self.depth = len(blocks)
        # Models that pool before they normalise keep their norm as fc_norm; features want it all the same.
        norm = parts.norm if not isinstance(parts.norm, nn.Identity) else parts.fc_norm
        rope = getattr(parts, "rope", None)
        rope_per_block = bool(getattr(parts, "rope_mixed", False))
        for name in ("blocks", "norm", "fc_norm", "head", "head_drop", "attn_pool", "rope"):
            if hasattr(parts, name):
                delattr(parts, name)
        parts.rope = None

        self.patch_embed = PatchEmbedding(vit)
        edges = [round(stage * self.depth / STAGES) for stage in range(STAGES + 1)]
        self.stages = nn.ModuleList(
            EncoderStage(
                blocks[edges[stage] : edges[stage + 1]],
                norm if stage == STAGES - 1 else nn.Identity(),
                edges[stage],
                rope_per_block,
            )
            for stage in range(STAGES)
        )
        self.rope = rope
        fixed: Tensor | None = None
        if rope is not None and not rope_per_block and not getattr(rope, "aug_active", False):
            fixed = rope.get_embed(shape=list(self.grid_size))
        self.register_buffer("fixed_rope", fixed, persistent=False)
        self._freeze()

    def frozen_modules(self) -> list[nn.Module]:
        """The modules that are frozen, in forward order."""
        if self.frozen == 0:
            return []
        rope = [self.rope] if self.rope is not None else []
        return [self.patch_embed, *rope, *list(self.stages)[: self.frozen]]

    def _freeze(self) -> None:
        for module in self.frozen_modules():
            module.requires_grad_(False).eval()

    def train(self, mode: bool = True) -> "ViTEncoder":
        """Set the mode, leaving frozen stages in eval mode."""
        super().train(mode)
        for module in self.frozen_modules():
            module.eval()
        return self

    def rotary_embedding(self, grid: tuple[int, int]) -> Tensor | None:
        """The rotary position embedding for a grid of patches, or None where the encoder has none."""
        if self.rope is None:
            return None
        if self.fixed_rope is not None and grid == self.grid_size:
            return cast(Tensor, self.fixed_rope)
        return cast(Tensor, cast(Any, self.rope).get_embed(shape=list(grid)))

    def depth_of(self, parameter: str) -> int:
        """Depth of a parameter by its name in this module: 0 embedding, 1 first block, `depth` last block.

        The layer numbering of layer-wise learning-rate decay (BEiT, arXiv 2106.08254).
        """
        parts = parameter.split(".")
        if parts[0] != "stages":
            return 0
        stage = cast(EncoderStage, self.stages[int(parts[1])])
        return stage.first + int(parts[3]) + 1 if parts[2] == "blocks" else self.depth

    def segments(self) -> dict[str, nn.Module]:
        """Names relative to the encoder, in forward order, a stage before the blocks that it holds."""
        found: dict[str, nn.Module] = {"patch_embed": self.patch_embed}
        for number, stage in enumerate(self.stages):
            found[f"stage{number}"] = stage
            for index, block in enumerate(cast(EncoderStage, stage).blocks):
                found[f"stage{number}.block{index}"] = block
                for unit in ("attn", "mlp"):
                    if isinstance(module := getattr(block, unit, None), nn.Module):
                        found[f"stage{number}.block{index}.{unit}"] = module
        return found


def build_encoder(
    name: str,
    *,
    weights: str,
    image_size: tuple[int, int],
    in_channels: int = 3,
    frozen: int | str = 0,
    drop_path: float = 0.0,
    dropout: float = 0.0,
) -> ViTEncoder:
    """Make an encoder from a timm name.

    Args:
        name: any timm `VisionTransformer` or EVA-type model, rotary ones included.
        weights: `pretrained` (timm's, from the Hugging Face hub or its cache), `random`, or the path of a
            `.safetensors` or `.pth` file with the weights of this architecture.
        image_size: (H, W) in pixels that the position embedding is resampled to, once. Other sizes work too,
            at the price of resampling at each step.
        in_channels: channels of the image.
        frozen: `none` or 0, `all`, or the number of stages (1 to 4) that are frozen, from the image on.
        drop_path: stochastic depth rate of the last block.
        dropout: dropout rate after each projection.

    Raises:
        UserError: an unknown or unsuited name, weights that cannot be had or belong to another architecture.
    """
    import timm

    if not timm.is_model(name):
        known = timm.list_models()
        near = difflib.get_close_matches(name.split(".")[0], known, n=3, cutoff=0.5)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        raise UserError(
            f"model.encoder.name={name}: timm has no such model.{hint} See timm.list_models('vit*')."
        )
    if not isinstance(weights, str) or not weights:
        raise UserError(f"model.encoder.weights={weights}: give pretrained, random, or a weights file")
    patch = _patch_size(name)
    arguments: dict[str, Any] = {
        "num_classes": 0,
        "in_chans": in_channels,
        "img_size": tuple(-(-side // step) * step for side, step in zip(image_size, patch, strict=True)),
        "dynamic_img_size": True,
        "drop_path_rate": drop_path,
        "proj_drop_rate": dropout,
    }
    vit = pretrained(name, arguments) if weights == "pretrained" else timm.create_model(name, **arguments)
    if weights not in ("pretrained", "random"):
        load_timm_weights(vit, Path(weights))
    defaults = cast(Any, vit).default_cfg
    mean, std = tuple(defaults["mean"]), tuple(defaults["std"])
    repeat = -(-in_channels // len(mean))
    return ViTEncoder(
        vit, (mean * repeat)[:in_channels], (std * repeat)[:in_channels], _frozen_stages(frozen)
    )


def _patch_size(name: str) -> tuple[int, int]:
    """The patch of a timm model in pixels; built without memory, since only the model itself knows."""
    import timm
    from timm.models.eva import Eva
    from timm.models.vision_transformer import VisionTransformer

    with torch.device("meta"):
        model = timm.create_model(name, num_classes=0)
    if not isinstance(model, VisionTransformer | Eva):
        raise UserError(
            f"model.encoder.name={name}: a {type(model).__name__} is not a plain vision transformer. "
            "Choose a ViT or EVA-type model, such as vit_base_patch16_224 or vit_base_patch16_dinov3."
        )
    return cast(tuple[int, int], tuple(cast(Any, model).patch_embed.patch_size))


def _frozen_stages(frozen: int | str) -> int:
    if frozen == "none":
        return 0
    if frozen == "all":
        return STAGES
    if isinstance(frozen, int) and not isinstance(frozen, bool) and 0 <= frozen <= STAGES:
        return frozen
    raise UserError(
        f"model.encoder.frozen={frozen}: give none, all, or a number of stages from 0 to {STAGES}"
    )
