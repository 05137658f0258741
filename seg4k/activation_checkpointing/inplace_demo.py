"""Put an in-place operation into a segment on purpose, and see the error.

    python -m seg4k.activation_checkpointing.inplace_demo

Four ways to change what a segment took, each run by `torch.utils.checkpoint` as it comes, with the skip as a
keyword as many decoders pass it, and by seg4k. Of the one it prints by how much the gradient is wrong, of the
other the error.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from seg4k.activation_checkpointing.apply import apply_activation_checkpointing
from seg4k.activation_checkpointing.errors import ActivationCheckpointingError
from seg4k.activation_checkpointing.plan import Plan

Change = Callable[[Tensor], Tensor]


class Fusion(nn.Module):
    """A decoder block: it takes features and a skip, and does something to the skip first."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 4, kernel_size=3, padding=1)
        self.change = change

    def forward(self, features: Tensor, skip: Tensor) -> Tensor:
        """Features and skip (B, 4, H, W) to (B, 4, H, W)."""
        fused: Tensor = self.conv(torch.cat([features, self.change(skip)], dim=1))
        return torch.sin(fused)


class Net(nn.Module):
    """An encoder and one decoder block; after it, the skip may be changed as well."""

    def __init__(self, inside: Change, after: Change) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Conv2d(3, 4, kernel_size=3, padding=1)
        self.decoder = Fusion(inside)
        self.after = after
        self.by_torch = False

    def forward(self, image: Tensor) -> Tensor:
        """Image (B, 3, H, W) to a scalar."""
        skip = self.encoder(image)
        features = skip * 0.5
        result: Tensor
        if self.by_torch:
            result = checkpoint(self.decoder, features, skip=skip, use_reentrant=False)
        else:
            result = self.decoder(features, skip=skip)
        self.after(skip)
        return result.sum()

    def segments(self) -> dict[str, nn.Module]:
        """What can be recomputed."""
        return {"decoder.block0": self.decoder}


def _nothing(x: Tensor) -> Tensor:
    return x


def _add(x: Tensor) -> Tensor:
    return x.add_(1.0)


def _add_to_data(x: Tensor) -> Tensor:
    x.data.add_(1.0)
    return x


CASES: dict[str, tuple[Change, Change]] = {
    "the segment does skip.add_(1)": (_add, _nothing),
    "the segment does skip.data.add_(1)": (_add_to_data, _nothing),
    "after it, the model does skip.add_(1)": (_nothing, _add),
    "after it, the model does skip.data.add_(1)": (_nothing, _add_to_data),
}


def _gradient(model: Net) -> Tensor:
    image = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    model.train()(image).backward()
    assert model.encoder.weight.grad is not None
    return model.encoder.weight.grad


def main() -> None:
    """Show what torch makes of each case, and what seg4k does."""
    for name, changes in CASES.items():
        expected = _gradient(Net(*changes))
        model = Net(*changes)
        model.by_torch = True
        error = ((_gradient(model) - expected).norm() / expected.norm()).item()
        print(f"{name}\n  torch.utils.checkpoint: gradient wrong by {error:.0%}, and no error")
        model = Net(*changes)
        apply_activation_checkpointing(model, Plan({"decoder.block0": "recompute"}))
        try:
            _gradient(model)
        except ActivationCheckpointingError as caught:
            print(f"  seg4k: {type(caught).__name__}: {caught}\n")
        else:
            raise AssertionError(f"not caught: {name}")


if __name__ == "__main__":
    main()
