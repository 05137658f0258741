"""Run a suite and write its result.

python benchmarks/run.py --suite cpu      seg4k beside its peers on the CPU, start-up, validation: ten minutes
python benchmarks/run.py --suite trace    the same at 4K on fake tensors, limits, cost per pixel: six minutes
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


def cpu(quick, size=256, repeats=5, backend="inductor"):
    import overheads
    from peer_models import PLAIN, Work
    from peers import compare

    if quick:
        work = Work("test_vit", 64, 64, classes=3, channels=(16, 16, 8, 8))
        arms = (PLAIN, "seg4k none", "seg4k auto", "timm set_grad_checkpointing")
        options = {"repeats": 1, "warmup": 0, "backend": "aot_eager", "arms": arms}
    else:
        work = Work(height=size, width=size)
        options = {"repeats": repeats, "warmup": 1, "backend": backend}
    config = {**asdict(work), **options, "precision": "fp32", "quick": quick}
    return config, {"peers": compare(work, **options), "overheads": overheads.suite(quick, min(2, repeats))}


def trace(quick):
    import peers_4k
    from peer_models import Work

    work, more = Work(height=2160, width=3840), {}
    if quick:
        work, more = peers_4k.quick()
    device = "rtx4090"
    config = {**asdict(work), "precision": "bf16", "device": device, "quick": quick}
    return config, peers_4k.suite(work, peers_4k.device_named(device), **more)


def gpu(quick):
    import gpu

    settings = gpu.DRY if quick else gpu.FULL
    return {**asdict(settings), "dry_run": quick}, gpu.run(settings)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--suite", choices=["cpu", "trace", "gpu"], required=True)
    parser.add_argument("--quick", action="store_true", help="a tiny model; for gpu a dry run on the CPU")
    parser.add_argument("--out", type=Path, help="directory; benchmarks/results by default")
    parser.add_argument("--size", type=int, default=256, help="side of the image in suite cpu")
    parser.add_argument("--repeats", type=int, default=5, help="rounds that are timed in suite cpu")
    parser.add_argument("--backend", default="inductor", help="of torch.compile in suite cpu")
    options = parser.parse_args()
    from provenance import RESULTS, provenance
    from render import SUITES, four_k_tables, gpu_tables, overheads_table, peers_table

    from seg4k.files import write_json
    from seg4k.training.run_card import finite

    if options.suite == "cpu":
        config, found = cpu(options.quick, options.size, options.repeats, options.backend)
    else:
        config, found = {"trace": trace, "gpu": gpu}[options.suite](options.quick)
    result = finite({**provenance(config), **found})
    path = (options.out or RESULTS) / SUITES[options.suite]
    if options.quick and options.out is None:
        path = None  # a run of seconds measures nothing that is worth keeping
    else:
        write_json(path, result)
    print(f"{path or 'nothing written: --quick without --out'}\n", file=sys.stderr, flush=True)
    if options.suite == "cpu":
        print(f"{peers_table(found['peers'])}\n\n{overheads_table(found['overheads'])}")
    else:
        print({"trace": four_k_tables, "gpu": gpu_tables}[options.suite](result))


if __name__ == "__main__":
    main()
