"""Run a suite and write its result.

python benchmarks/run.py --suite cpu      beside its peers on the CPU, start-up, validation: a quarter hour
python benchmarks/run.py --suite trace    at 4K on fake tensors, limits, cost per pixel: three minutes
python benchmarks/run.py --suite gpu      on a GPU, at most eight minutes
python benchmarks/run.py --suite cpu --quick --out /tmp/results    seconds, to see that it works

Then `python benchmarks/render.py` turns the results into the tables of benchmarks/README.md and README.md.
"""

import argparse
import os
import sys
from dataclasses import asdict
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]  # run from anywhere, also without an installed seg4k
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no suite needs the network


def cpu(options):
    """The parts of the suite, each as soon as it is there."""
    import overheads
    from peer_models import PLAIN, Work
    from peers import compare

    quick = options.quick
    if quick:
        work = Work("test_vit", 64, 64, classes=3, channels=(16, 16, 8, 8))
        arms = (PLAIN, "seg4k none", "seg4k auto", "timm set_grad_checkpointing")
        more = {"repeats": 1, "warmup": 0, "backend": "aot_eager", "arms": arms}
    else:
        work = Work(options.encoder, options.size, options.size)
        more = {"repeats": options.repeats, "warmup": 1, "backend": options.backend}
    config = {**asdict(work), **more, "precision": "fp32", "quick": quick}
    found = {"peers": compare(work, **more)}
    yield config, found
    yield config, {**found, "overheads": overheads.suite(quick, min(2, more["repeats"]))}


def trace(options):
    import peers_4k
    from peer_models import Work

    work, more = Work(height=2160, width=3840), {}
    if options.quick:
        work, more = peers_4k.quick()
    device = "rtx4090"
    config = {**asdict(work), "precision": "bf16", "device": device, "quick": options.quick}
    yield config, peers_4k.suite(work, peers_4k.device_named(device), **more)


def gpu(options):
    import gpu

    settings = gpu.DRY if options.quick else gpu.FULL
    yield {**asdict(settings), "dry_run": options.quick}, gpu.run(settings)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--suite", choices=["cpu", "trace", "gpu"], required=True)
    parser.add_argument("--quick", action="store_true", help="a tiny model; for gpu a dry run on the CPU")
    parser.add_argument("--out", type=Path, help="directory; benchmarks/results by default")
    parser.add_argument("--encoder", default="vit_small_patch16_224", help="timm's, in suite cpu")
    parser.add_argument("--size", type=int, default=384, help="side of the image in suite cpu")
    parser.add_argument("--repeats", type=int, default=5, help="rounds that are timed in suite cpu")
    parser.add_argument("--backend", default="inductor", help="of torch.compile in suite cpu")
    options = parser.parse_args()
    from provenance import RESULTS, provenance
    from render import SUITES, cpu_tables, four_k_tables, gpu_tables

    from seg4k.files import write_json
    from seg4k.training.run_card import finite

    path = (options.out or RESULTS) / SUITES[options.suite]
    for config, found in {"cpu": cpu, "trace": trace, "gpu": gpu}[options.suite](options):
        result = finite({**provenance(config), **found})
        if not options.quick or options.out:  # else it measures nothing that is worth keeping
            write_json(path, result)
            print(f"written: {path}", file=sys.stderr, flush=True)
    print({"cpu": cpu_tables, "trace": four_k_tables, "gpu": gpu_tables}[options.suite](result))


if __name__ == "__main__":
    main()
