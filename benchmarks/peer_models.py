"""The arms of the comparison: seg4k's modes, and what people use today for the same work.

Every arm trains a ViT + U-Net (smp's decoder blocks) from the same weights on the same batch with the same
loss; only transformers brings a decoder of its own. Peers are the packages as installed, called as their
documentation says.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import timm
import torch
from timm.layers import set_reentrant_ckpt
from timm.layers.attention import Attention
from timm.layers.mlp import Mlp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    CheckpointWrapper,
    checkpoint_wrapper,
)
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing as wrap_modules,
)
from torch.nn import functional as F

from seg4k.activation_checkpointing import Plan, apply_activation_checkpointing, make_plan
from seg4k.models.vit_unet import ViTUNet, build_model

PLAIN, TRANSFORMERS = "timm + smp, as it is", "transformers DPT, as it is"
SEG4K = ("none", "stage", "selective", "auto")
CONV_UNITS = ("Conv2dReLU",)  # of smp


@dataclass(frozen=True)
class Work:
    """What every arm does: the encoder, the image's size, the batch, and the classes."""

    encoder: str = "vit_base_patch16_224"
    height: int = 256
    width: int = 256
    batch: int = 1
    classes: int = 19
    channels: tuple[int, ...] = (256, 128, 64, 32)


class PlainUNet(nn.Module):
    """timm's own model with a neck and smp's decoder blocks: what one writes by hand for a ViT.

    Args:
        model: its neck, decoder, head and weights are taken over.
        vit: timm's model of the same encoder.
    """

    def __init__(self, model: ViTUNet, vit: nn.Module) -> None:
        super().__init__()
        self.vit = vit
        self.vit.load_state_dict(timm_weights(model))
        self.neck, self.decoder, self.head = model.neck, model.decoder, model.head
        self.register_buffer("mean", model.mean)
        self.register_buffer("std", model.std)

    def forward(self, image):
        image = (image.to(self.mean.dtype) / 255 - self.mean) / self.std
        patch = self.vit.patch_embed.patch_size[0]
        height, width = image.shape[-2:]
        image = F.pad(image, (0, -width % patch, 0, -height % patch))
        size, depth = image.shape[-2:], len(self.vit.blocks)
        indices = [round(depth / 2) - 1, round(depth * 3 / 4) - 1]
        last, (second, third) = self.vit.forward_intermediates(image, indices=indices, norm=False)
        rows, columns = second.shape[-2:]
        x = self.neck["stride16"](last, rows, columns)
        at = {stride: tuple(-(-side // stride) for side in size) for stride in (8, 4, 2, 1)}
        skips = {
            8: resized(self.neck["stride8"].upsample(third), at[8]),
            4: resized(self.neck["stride4"].upsample(second), at[4]),
            2: self.neck["stride2"](image),
            1: None,
        }
        for index, (stride, skip) in enumerate(skips.items()):
            x = self.decoder[f"block{index}"](x, *at[stride], skip)
        return self.head(x)[..., :height, :width]

    def segments(self) -> dict[str, nn.Module]:
        """Where memory is; for tracing."""
        blocks = {f"encoder.block{i}": block for i, block in enumerate(self.vit.blocks)}
        neck = {f"neck.{name}": getattr(level, "upsample", level) for name, level in self.neck.items()}
        decoder = {f"decoder.{name}": block for name, block in self.decoder.items()}
        return {"encoder.patch_embed": self.vit.patch_embed, **blocks, **neck, **decoder, "head": self.head}


def resized(x, size):
    """A level of patches that are no power of two, brought to its exact size."""
    return x if x.shape[-2:] == size else F.interpolate(x, size=size, mode="bilinear", align_corners=False)


def timm_weights(model: ViTUNet) -> dict[str, torch.Tensor]:
    """The weights of a ViTUNet's encoder under timm's names."""
    found = dict(model.encoder.patch_embed.stem.state_dict())
    for stage in model.encoder.stages:
        for index, block in enumerate(stage.blocks, start=stage.first):
            found |= {f"blocks.{index}.{name}": value for name, value in block.state_dict().items()}
    norm = model.encoder.stages[-1].norm
    return found | {f"norm.{name}": value for name, value in norm.state_dict().items()}


def seg4k_model(work: Work) -> ViTUNet:
    """The model of seg4k's arms, with weights of seed 0."""
    torch.manual_seed(0)
    config = {
        "encoder": {"name": work.encoder, "weights": "random"},
        "decoder": {"channels": list(work.channels), "norm": "batch"},
        "head": {"stride": 1},
    }
    return build_model(config, num_classes=work.classes, image_size=(work.height, work.width)).train()


def plain_model(work: Work) -> PlainUNet:
    """The same model as timm and smp have it."""
    model = seg4k_model(work)
    size = tuple(
        -(-side // patch) * patch
        for side, patch in zip((work.height, work.width), model.encoder.patch_size, strict=True)
    )
    vit = timm.create_model(work.encoder, img_size=size, dynamic_img_size=True, num_classes=0)
    return PlainUNet(model, vit).train()


class Transformers(nn.Module):
    """Hugging Face's DPT with a ViT of the same size as its encoder and its own decoder and loss."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        from transformers import DPTConfig, DPTForSemanticSegmentation

        vit = timm.create_model(work.encoder, num_classes=0, img_size=64, dynamic_img_size=True)
        depth, dim = len(vit.blocks), vit.embed_dim
        torch.manual_seed(0)
        config = DPTConfig(
            hidden_size=dim,
            num_hidden_layers=depth,
            num_attention_heads=vit.blocks[0].attn.num_heads,
            intermediate_size=vit.blocks[0].mlp.fc1.out_features,
            image_size=384,
            patch_size=16,
            num_labels=work.classes,
            is_hybrid=False,
            backbone_out_indices=[round(depth * share / 4) - 1 for share in (1, 2, 3, 4)],
            neck_hidden_sizes=[dim // 8, dim // 4, dim // 2, dim],
            fusion_hidden_size=min(256, dim),
            use_auxiliary_head=False,
            semantic_classifier_dropout=0.0,
        )
        self.dpt = DPTForSemanticSegmentation(config)

    def forward(self, image):
        return self.dpt(pixel_values=(image.float() / 255 - 0.5) / 0.5).logits

    def segments(self) -> dict[str, nn.Module]:
        """Where memory is; for tracing."""
        encoder = self.dpt.dpt.encoder.layer
        blocks = {f"encoder.block{i}": layer for i, layer in enumerate(encoder)}
        return {**blocks, "neck": self.dpt.neck, "head": self.dpt.head}


def loss_of(model: nn.Module, image, mask):
    """Cross-entropy of whole logits, as people write it."""
    logits = model(image)
    if logits.shape[-2:] != mask.shape[-2:]:
        logits = F.interpolate(logits, size=mask.shape[-2:], mode="bilinear", align_corners=False)
    return F.cross_entropy(logits.float(), mask)


def shared_copy(model: nn.Module) -> nn.Module:
    """A copy of the modules on the same parameters, so that it can be wrapped."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})


def wrapped_per_layer(model: nn.Module) -> nn.Module:
    """torch's wrapper around each attention, MLP and convolution unit."""

    def is_layer(module):
        return isinstance(module, Attention | Mlp) or type(module).__name__ in CONV_UNITS

    wrap_modules(model, checkpoint_wrapper_fn=checkpoint_wrapper, check_fn=is_layer)
    return model


def wrapped_reentrant(model: nn.Module) -> nn.Module:
    """Each part under the reentrant variant, which is torch's default where none is named."""
    for index, block in enumerate(model.vit.blocks):
        model.vit.blocks[index] = checkpoint_wrapper(block, checkpoint_impl=CheckpointImpl.REENTRANT)
    for parts in (model.neck, model.decoder):
        for name, part in parts.items():
            if hasattr(part, "upsample"):
                part.upsample = checkpoint_wrapper(part.upsample, checkpoint_impl=CheckpointImpl.REENTRANT)
            else:
                parts[name] = checkpoint_wrapper(part, checkpoint_impl=CheckpointImpl.REENTRANT)
    return model


class Compiled(nn.Module):
    """A compiled model in which torch chooses what to recompute, within a share of the activations."""

    def __init__(self, model: nn.Module, budget: float, backend: str) -> None:
        super().__init__()
        self.compiled = torch.compile(model, backend=backend)
        self.budget = budget

    def forward(self, image):
        from torch._functorch import config

        with config.patch(activation_memory_budget=self.budget):  # read when the graph is cut in two
            return self.compiled(image)


@dataclass(frozen=True)
class Arm:
    """One row.

    Attributes:
        name: what the row is called.
        family: arms of one family have the same model and compare with its first.
        kind: which model: seg4k, plain or transformers.
        prepare: puts the arm's checkpointing on a model that others share, and returns what to call.
        traceable: it runs on fake tensors.
    """

    name: str
    kind: str
    prepare: Callable[..., nn.Module]
    traceable: bool = True

    @property
    def baseline(self) -> str:
        """The arm of the same model that recomputes nothing."""
        return TRANSFORMERS if self.kind == "transformers" else PLAIN


def build(kind: str, work: Work) -> nn.Module:
    """The model of a kind of arm."""
    return {"seg4k": seg4k_model, "plain": plain_model, "transformers": Transformers}[kind](work).train()


def _seg4k(mode: str):
    def prepare(model: nn.Module, *, plan: Plan | None = None, **_: Any) -> nn.Module:
        if plan is None:
            plan = make_plan(mode, list(model.segments()))
        apply_activation_checkpointing(model, plan, audit="off")
        return model

    return prepare


def _timm(checkpointing: bool, reentrant: bool = False):
    def prepare(model: nn.Module, **_: Any) -> nn.Module:
        set_reentrant_ckpt(reentrant)
        model.vit.set_grad_checkpointing(checkpointing)
        return model

    return prepare


def _copied(change: Callable[[nn.Module], nn.Module]):
    def prepare(model: nn.Module, **_: Any) -> nn.Module:
        return change(shared_copy(model))

    return prepare


def _compiled(budget: float):
    def prepare(model: nn.Module, *, backend: str = "inductor", **_: Any) -> nn.Module:
        return Compiled(shared_copy(model), budget, backend)

    return prepare


def _transformers(checkpointing: bool):
    def prepare(model: nn.Module, **_: Any) -> nn.Module:
        verb = "enable" if checkpointing else "disable"
        # Newer releases call it so, and the older name warns.
        newer = getattr(model.dpt, f"activation_checkpointing_{verb}", None)
        (newer or getattr(model.dpt, f"gradient_checkpointing_{verb}"))()
        return model

    return prepare


ARMS = {
    arm.name: arm
    for arm in (
        Arm(PLAIN, "plain", _timm(False)),
        *(Arm(f"seg4k {mode}", "seg4k", _seg4k(mode)) for mode in SEG4K),
        Arm("timm set_grad_checkpointing", "plain", _timm(True)),
        Arm("timm set_grad_checkpointing, reentrant", "plain", _timm(True, reentrant=True)),
        Arm("torch wrapper around each layer", "plain", _copied(wrapped_per_layer)),
        Arm("torch wrapper around each part, reentrant", "plain", _copied(wrapped_reentrant)),
        Arm("torch.compile, activation_memory_budget=0.5", "plain", _compiled(0.5), traceable=False),
        Arm("torch.compile, activation_memory_budget=0.1", "plain", _compiled(0.1), traceable=False),
        Arm(TRANSFORMERS, "transformers", _transformers(False)),
        Arm("transformers gradient_checkpointing_enable", "transformers", _transformers(True)),
    )
}


def plain_parameter(name: str) -> str:
    """A parameter's name without what wrappers and the compiler add."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("compiled._orig_mod.", "")


def is_wrapped(module: nn.Module) -> bool:
    """Whether torch's wrapper is around it."""
    return isinstance(module, CheckpointWrapper)


def strips_loss(loss: nn.Module, model: nn.Module, batch):
    """Cross-entropy as seg4k ships it: head and loss by strips."""
    from seg4k.losses.strips import strip_loss

    features = model.forward_features(batch["image"])
    return strip_loss(features, model.head, batch["mask"], loss, upsample=model.head_stride)


def whole_loss(model: nn.Module, batch):
    """Cross-entropy of whole logits."""
    return loss_of(model, batch["image"], batch["mask"])


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of every arm."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def step_of(model: nn.Module, work: Work, precision: str, loss: str):
    """A training step of a model, for tracing: loss is `whole` or `strips`."""
    from seg4k.losses.build import build_loss
    from seg4k.memory.step import Step

    size = (work.batch, work.height, work.width)
    shapes = {"image": ((work.batch, 3, *size[1:]), torch.uint8), "mask": (size, torch.int64)}
    if loss == "whole":
        return Step(model, whole_loss, adamw, shapes, precision)
    criterion = build_loss({"terms": {"ce": 1.0}}, work.classes)
    return Step(model, partial(strips_loss, criterion), adamw, shapes, precision, modules=(criterion,))


def seg4k_step(work: Work, precision: str, loss: str):
    """The step of seg4k's model; plans are put on it by the trace."""
    with torch.device("meta"):
        model = seg4k_model(work)
    return step_of(model, work, precision, loss)


def first_step(work: Work, precision: str, loss: str):
    """The same before there is any optimizer state."""
    return replace(seg4k_step(work, precision, loss), is_first=True)


def arm_step(name: str, work: Work, precision: str, loss: str = "whole"):
    """The step of an arm with its checkpointing on."""
    with torch.device("meta"):
        model = build(ARMS[name].kind, work)
        model = ARMS[name].prepare(model).train()
    return step_of(model, work, precision, loss)
