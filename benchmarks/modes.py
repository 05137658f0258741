"""What each mode saves and costs: bytes kept for backward, operations, and step time, the arms alternating.

python benchmarks/modes.py                    ViT-B/16 at 512x512, fp32, CPU: about ten minutes on two cores
python benchmarks/modes.py --size 128 --repeats 3 --encoder vit_tiny_patch16_224

Beside the modes: timm's own `set_grad_checkpointing` on the same encoder, with the same neck and decoder.
"""

import argparse
from dataclasses import asdict
from pathlib import Path

import torch
from peer_models import Work, plain_model, seg4k_model
from provenance import provenance
from torch.nn import functional as F

from seg4k.activation_checkpointing import apply_activation_checkpointing, make_plan
from seg4k.activation_checkpointing.measure import measure_segments
from seg4k.files import write_json
from seg4k.studies.speed import interleaved_timing

MODES = ("none", "stage", "block", "layer", "encoder", "decoder", "selective")


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

    work = Work(arguments.encoder, arguments.size, arguments.size)
    model, peer = seg4k_model(work).train(), plain_model(work).train()
    peer.vit.set_grad_checkpointing(True)
    image, mask = (
        torch.rand(1, 3, work.height, work.width),
        torch.randint(work.classes, (1, work.height, work.width)),
    )
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

    print(f"{work.encoder} + U-Net, {work.width}x{work.height}, fp32, {torch.get_num_threads()} threads\n")
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
        config = {**asdict(work), "precision": "fp32"}
        config |= {"warmup": arguments.warmup, "repeats": arguments.repeats}
        write_json(arguments.out, {**provenance(config), "rows": rows})


if __name__ == "__main__":
    main()
