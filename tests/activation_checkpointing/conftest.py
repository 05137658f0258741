import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seg4k.activation_checkpointing import Plan, apply_activation_checkpointing


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Kernels may split their sums by the number of threads: bits are compared at one number only."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class DropPath(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0:
            return x
        return x * x.new_empty(x.shape[0], 1, 1).bernoulli_(1 - self.rate).div_(1 - self.rate)


class Attention(nn.Module):
    def __init__(self, dim: int, dropout: float) -> None:
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return self.dropout(self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))


class Block(nn.Module):
    def __init__(self, dim: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = Attention(dim, dropout)
        self.mlp = nn.Sequential(
            nn.Linear(dim, 2 * dim), nn.GELU(), nn.Dropout(dropout), nn.Linear(2 * dim, dim)
        )
        self.drop_path = DropPath(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.attn(self.norm1(x)))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class Decoder(nn.Module):
    """Takes the skip as a keyword and returns through in-place ReLUs, as smp's blocks do."""

    def __init__(self, channels: int, skip: int, out: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1 = Fusion(channels + skip, out, norm)
        self.conv2 = nn.Sequential(
            nn.Conv2d(out, out, 3, padding=1, bias=False), norm(out), nn.ReLU(inplace=True)
        )

    def forward(self, x: Tensor, size: int, skip: Tensor | None = None) -> Tensor:
        return self.conv2(self.conv1([x], size, skip=skip))


class Fusion(nn.Module):
    def __init__(self, channels: int, out: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, out, 3, padding=1, bias=False)
        self.norm, self.act = norm(out), nn.ReLU(inplace=True)

    def forward(self, features: list[Tensor], size: int, skip: Tensor | None = None) -> Tensor:
        x = F.interpolate(features[0], size=(size, size))
        if skip is not None:
            x = torch.cat([x, skip], 1)
        return self.act(self.norm(self.conv(x)))


class ToyUNet(nn.Module):
    """All that a ViT-U-Net does to a checkpoint, at the size of a toy: images (B, 3, 16, 16), 5 classes."""

    dim = 8

    def __init__(
        self, norm: str = "batch", dropout: float = 0.0, frozen: bool = False, depth: int = 2
    ) -> None:
        super().__init__()
        make = nn.BatchNorm2d if norm == "batch" else lambda channels: nn.GroupNorm(2, channels)
        self.patch_embed = nn.Conv2d(3, self.dim, 4, stride=4)
        self.stages = nn.ModuleList(
            nn.Sequential(*(Block(self.dim, dropout) for _ in range(depth))) for _ in range(2)
        )
        self.neck = nn.ModuleDict(
            {
                "stride4": nn.Conv2d(self.dim, self.dim, 1),
                "stride2": nn.Sequential(
                    nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False), make(4), nn.ReLU(inplace=True)
                ),
            }
        )
        self.decoder = nn.ModuleList([Decoder(self.dim, 4, 8, make), Decoder(8, 0, 4, make)])
        self.head = nn.Conv2d(4, 5, 3, padding=1)
        self.frozen = frozen
        for module in self.encoder() if frozen else ():
            module.requires_grad_(False)

    def encoder(self) -> list[nn.Module]:
        return [self.patch_embed, self.stages]

    def train(self, mode: bool = True) -> "ToyUNet":
        super().train(mode)
        for module in self.encoder() if self.frozen else ():
            module.eval()
        return self

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch_embed(image).flatten(2).transpose(1, 2)
        for stage in self.stages:
            x = stage(x)
        x = self.neck["stride4"](x.transpose(1, 2).reshape(len(image), self.dim, 4, 4))
        x = self.decoder[0](x, 8, skip=self.neck["stride2"](image))
        x = self.decoder[1](x, 16)
        return self.head(x)

    def segments(self) -> dict[str, nn.Module]:
        found: dict[str, nn.Module] = {"encoder.patch_embed": self.patch_embed}
        for s, stage in enumerate(self.stages):
            found[f"encoder.stage{s}"] = stage
            for b, block in enumerate(stage):
                found[f"encoder.stage{s}.block{b}"] = block
                found[f"encoder.stage{s}.block{b}.attn"] = block.attn
                found[f"encoder.stage{s}.block{b}.mlp"] = block.mlp
        found |= {f"neck.{name}": level for name, level in self.neck.items()}
        for d, block in enumerate(self.decoder):
            found[f"decoder.block{d}"] = block
            found[f"decoder.block{d}.conv1"] = block.conv1
            found[f"decoder.block{d}.conv2"] = block.conv2
        return {**found, "head": self.head}


@pytest.fixture
def toy() -> Callable[..., ToyUNet]:
    """Make a toy model in training mode; the same weights for the same arguments."""

    def make(**options: Any) -> ToyUNet:
        torch.manual_seed(0)
        return ToyUNet(**options).train()

    return make


class Lone(nn.Module):
    """A model of one segment, `part`, whose forward is any function."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Part()

    def segments(self) -> dict[str, nn.Module]:
        return {"part": self.part}


class Part(nn.Module):
    def forward(self, body: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return body(*args, **kwargs)


@pytest.fixture
def lone() -> Callable[..., Callable[..., Any]]:
    """Make a module, `call(function, *args)`, which runs the function as a segment recomputed by a policy."""

    def make(policy: str = "recompute", audit: str = "first_step") -> Callable[..., Any]:
        model = Lone().train()
        apply_activation_checkpointing(model, Plan({"part": policy}), audit=audit)

        return model.part

    return make


class Outcome:
    """All that a training step leaves behind, for comparison bit for bit."""

    def __init__(self, losses: list[Tensor], model: nn.Module) -> None:
        self.losses = losses
        self.gradients = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        self.weights = {n: p.detach().clone() for n, p in model.named_parameters()}
        self.buffers = {n: b.clone() for n, b in model.named_buffers()}
        self.rng = torch.get_rng_state()

    def differences(self, other: "Outcome") -> list[str]:
        found = [
            f"loss {i}"
            for i, (a, b) in enumerate(zip(self.losses, other.losses, strict=True))
            if not equal(a, b)
        ]
        for what in ("gradients", "weights", "buffers"):
            mine, theirs = getattr(self, what), getattr(other, what)
            assert mine.keys() == theirs.keys()
            found += [f"{what} {name}" for name in mine if not equal(mine[name], theirs[name])]
        return found + (["rng"] if not torch.equal(self.rng, other.rng) else [])


def equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and torch.equal(one, other)


@pytest.fixture
def train() -> Callable[..., Outcome]:
    """Train a model for some steps and return the `Outcome`."""

    def run(
        model: nn.Module,
        *,
        steps: int = 1,
        precision: str = "fp32",
        accumulate: int = 1,
        size: int = 16,
        classes: int = 5,
        batch: int = 2,
    ) -> Outcome:
        generator = torch.Generator().manual_seed(7)
        torch.manual_seed(11)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=precision == "fp16")
        dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            for _ in range(accumulate):
                image = torch.rand(batch, 3, size, size, generator=generator)
                mask = torch.randint(classes, (batch, size, size), generator=generator)
                with torch.autocast("cpu", dtype, enabled=dtype is not None):
                    loss = F.cross_entropy(model(image), mask) / accumulate
                losses.append(loss.detach().clone())
                scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return Outcome(losses, model)

    return run


@pytest.fixture
def same_as_none(train: Callable[..., Outcome]) -> Callable[..., None]:
    """Assert that a plan changes nothing of what training a model leaves behind."""

    def check(model: nn.Module, plan: Plan, audit: str = "first_step", **options: Any) -> None:
        plain = copy.deepcopy(model)
        apply_activation_checkpointing(model, plan, audit=audit)
        assert train(model, **options).differences(train(plain, **options)) == []

    return check
