"""What each mode saves and costs: bytes kept for backward, operations, and step time, the arms alternating.

python benchmarks/modes.py                    ViT-B/16 at 512x512, fp32, CPU: about ten minutes on two cores
python benchmarks/modes.py --size 128 --repeats 3 --encoder vit_tiny_patch16_224

Beside the modes: timm's own `set_grad_checkpointing` on the same encoder, with the same neck and decoder.
"""

import argparse
import copy
import datetime
from pathlib import Path

import timm
import torch
from torch import nn
from torch.nn import functional as F

from seg4k.activation_checkpointing import apply_activation_checkpointing, make_plan
from seg4k.activation_checkpointing.measure import measure_segments
from seg4k.files import write_json
from seg4k.models.vit_unet import build_model
from seg4k.studies.speed import interleaved_timing
from seg4k.training.run_card import code_state, device_state, environment

MODES = ("none", "stage", "block", "layer", "encoder", "decoder", "selective")
CLASSES = 19


class TimmCheckpointed(nn.Module):
    """Neck, decoder and head of a `ViTUNet` on timm's own model, with timm's own checkpointing."""

    def __init__(self, name, size, parts):
        super().__init__()
        self.vit = timm.create_model(name, img_size=size, dynamic_img_size=True, num_classes=0)
        self.vit.set_grad_checkpointing(True)
        self.parts = parts

    def forward(self, image):
        parts, vit = self.parts, self.vit
        height, width = image.shape[-2:]
        depth = len(vit.blocks)
        last, (second, third) = vit.forward_intermediates(
            parts.preprocess(image), indices=[depth // 2 - 1, depth * 3 // 4 - 1], norm=False
        )
        rows, columns = second.shape[-2:]
        skips = {
            8: parts.neck["stride8"].upsample(third),
            4: parts.neck["stride4"].upsample(second),
            2: parts.neck["stride2"](parts.preprocess(image)),
            1: None,
        }
        x = parts.neck["stride16"](last, rows, columns)
        for index, (stride, skip) in enumerate(skips.items()):
            x = parts.decoder[f"block{index}"](x, height // stride, width // stride, skip)
        return parts.head(x)


def saved_bytes(model, image, mask):
    """Bytes of the distinct storages that autograd keeps, beside parameters."""
    known = {
        tensor.untyped_storage()._cdata for tensor in [*model.parameters(), *model.buffers(), image, mask]
    }
    sizes = {}
    kept = []  # an address must not be handed out again while we count

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            sizes[storage._cdata] = storage.nbytes()
            kept.append(storage)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = F.cross_entropy(model(image), mask)
    del loss
    return sum(sizes.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--encoder", default="vit_base_patch16_224")
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    size = (arguments.size, arguments.size)
    config = {
        "encoder": {"name": arguments.encoder, "weights": "random"},
        "decoder": {"channels": [256, 128, 64, 32], "norm": "batch"},
        "head": {"stride": 1},
    }
    model = build_model(config, num_classes=CLASSES, image_size=size).train()
    image, mask = torch.rand(1, 3, *size), torch.randint(0, CLASSES, (1, *size))
    peer = TimmCheckpointed(arguments.encoder, size, copy.deepcopy(model)).train()
    names = list(model.segments())
    plans = {mode: make_plan(mode, names) for mode in MODES}

    rows = {}
    for mode, plan in plans.items():
        measured = measure_segments(
            model, image, loss_fn=lambda logits: F.cross_entropy(logits, mask), plan=plan
        )
        rows[mode] = {
            "segments": len(plan),
            "saved_bytes": measured.saved_bytes,
            "forward_flops": measured.forward_flops,
            "recompute_flops": measured.recompute_flops,
        }
    rows["timm set_grad_checkpointing"] = {
        "segments": len(peer.vit.blocks),
        "saved_bytes": saved_bytes(peer, image, mask),
        "forward_flops": rows["none"]["forward_flops"],
        "recompute_flops": None,
    }

    optimizers = {id(m): torch.optim.AdamW(m.parameters()) for m in (model, peer)}

    def arm(net, plan=None):
        def run():
            if plan is not None:
                apply_activation_checkpointing(net, plan, audit="off")
            F.cross_entropy(net(image), mask).backward()
            optimizers[id(net)].step()
            optimizers[id(net)].zero_grad(set_to_none=True)

        return run

    arms = {mode: arm(model, plan) for mode, plan in plans.items()}
    arms["timm set_grad_checkpointing"] = arm(peer)
    timing = interleaved_timing(arms, warmup=arguments.warmup, repeats=arguments.repeats)
    for name, times in timing["arms"].items():
        rows[name] |= times

    print(f"{arguments.encoder} + U-Net, {size[0]}x{size[1]}, fp32, {torch.get_num_threads()} threads\n")
    print("| mode | segments | saved for backward | recompute, GFLOP (of forward) | step, s | time ratio |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, row in rows.items():
        again = row["recompute_flops"]
        share = "" if again is None else f"{again / 1e9:.1f} ({again / row['forward_flops']:.1%})"
        print(
            f"| {name} | {row['segments']} | {row['saved_bytes'] / 2**20:.0f} MiB | {share} "
            f"| {row['median_seconds']:.2f} | {row['ratio']:.3f} |"
        )
    if arguments.out:
        content = {
            "command": "python benchmarks/modes.py",
            "date": datetime.date.today().isoformat(),
            "encoder": arguments.encoder,
            "image_size": size,
            "precision": "fp32",
            "threads": torch.get_num_threads(),
            "warmup": arguments.warmup,
            "repeats": arguments.repeats,
            "code": code_state(),
            "environment": environment(),
            "device": device_state("cpu", None, 1),
            "rows": rows,
        }
        write_json(arguments.out, content)


if __name__ == "__main__":
    main()
