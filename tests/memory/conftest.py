import sys

import pytest

from seg4k.memory.trace import trace

# A module of its own, since the tracing process has to import it.
BUILDERS = '''
from functools import partial

import torch
from torch import nn

from seg4k.errors import UserError
from seg4k.losses.build import build_loss
from seg4k.losses.strips import strip_loss
from seg4k.memory.step import Step
from seg4k.models.vit_unet import build_model


def adamw(model):
    return torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)


def forward(loss, strips, model, batch):
    features = model.forward_features(batch["image"])
    return strip_loss(features, model.head, batch["mask"], loss, strips, upsample=model.head_stride)


def vit_unet(
    size=(64, 64), *, encoder="test_vit", classes=5, batch=1, device="meta", strips=1, frozen=0, **more
):
    """A step of the smallest ViT-U-Net."""
    with torch.device(device):
        model = build_model(
            {
                "in_channels": 3,
                "encoder": {"name": encoder, "weights": "random", "frozen": frozen},
                "decoder": {"channels": (64, 32, 32, 16), "norm": "batch"},
                "head": {"stride": 1},
            },
            num_classes=classes,
            image_size=size,
        )
    loss = build_loss({"terms": {"ce": 1.0}}, classes)
    shapes = {"image": ((batch, 3, *size), torch.uint8), "mask": ((batch, *size), torch.int64)}
    return Step(model, partial(forward, loss, strips), adamw, shapes, modules=(loss,), **more)


class Pyramid(nn.Module):
    """Layers whose widths differ, each a segment: fast to trace, and with many plans."""

    def __init__(self, widths):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(a, 2 * b), nn.GELU(), nn.Linear(2 * b, b), nn.GELU())
            for a, b in zip(widths, widths[1:])
        )

    def segments(self):
        return {f"layer{index}": layer for index, layer in enumerate(self.layers)}

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def pyramid(widths=(32, 64, 32, 128, 48, 96, 32), rows=1 << 16):
    return Step(Pyramid(widths), total, sgd, {"x": ((rows, widths[0]), torch.float32)}, precision="fp32")


class Chain(nn.Module):
    """Linear layers, each a segment."""

    def __init__(self, width, depth):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))

    def segments(self):
        return {f"layer{index}": layer for index, layer in enumerate(self.layers)}

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def total(model, batch):
    return model(batch["x"]).square().sum()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def chain(width=128, depth=3, rows=32, **options):
    """A step of linear layers."""
    shapes = {"x": ((rows, width), torch.float32)}
    return Step(Chain(width, depth), total, sgd, shapes, **{"precision": "fp32", **options})


def mistaken():
    raise UserError("a mistake: mend it")


def broken():
    raise ZeroDivisionError
'''


class HereTracer:
    """A tracer in this process: quicker for steps as small as these.

    Traces are taken from `store` where they are there, but `plans` are only those that were asked for here.
    """

    def __init__(self, step, store=None):
        self.step = step
        self.segment_names = list(step.model.segments())
        self.traces = {}
        self.store = {} if store is None else store

    @property
    def plans(self):
        return [plan for plan, with_held in self.traces if not with_held]

    def trace(self, plan, *, with_held=False):
        key = (plan, with_held)
        if key not in self.store:
            self.store[key] = trace(self.step, plan, with_held=with_held)
        self.traces[key] = self.store[key]
        return self.traces[key]


@pytest.fixture(scope="session")
def here():
    return HereTracer


@pytest.fixture(scope="session")
def builders(tmp_path_factory):
    """Functions that make small steps, importable in other processes too."""
    folder = tmp_path_factory.mktemp("builders")
    (folder / "step_builders.py").write_text(BUILDERS)
    sys.path.insert(0, str(folder))
    import step_builders

    yield step_builders
    sys.path.remove(str(folder))
