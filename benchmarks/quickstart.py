"""experiment=quickstart under three seeds, with nothing recomputed and under `stage`: scores and peaks.

python benchmarks/quickstart.py                       six runs of about 150 s on two cores
python benchmarks/quickstart.py --runs FOLDER         keep the runs there; complete ones are not repeated

Ends with status 1 where a mode changes a score by one bit.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from provenance import RESULTS, child_environment, provenance

from seg4k.files import write_json

MODES = ("none", "stage")
SEEDS = (0, 1, 2)


def card_of(directory, mode, seed, overrides):
    """The card of one run, made or brought to its end unless it is complete."""
    path = directory / "run_card.json"
    if not path.is_file() or json.loads(path.read_text(encoding="utf-8"))["status"] != "completed":
        words = [f"activation_checkpointing={mode}", f"seed={seed}", f"hydra.run.dir={directory}", *overrides]
        words.append("resume=auto")
        command = [sys.executable, "-m", "seg4k", "train", "experiment=quickstart", *words]
        status = subprocess.run(command, check=False, env=child_environment()).returncode
        if status:
            raise SystemExit(f"{directory}: the run ended with status {status}")
    return json.loads(path.read_text(encoding="utf-8"))


def row_of(card):
    return {
        "mode": card["config"]["activation_checkpointing"]["mode"],
        "seed": card["seed"],
        "metrics": card["metrics"],
        "peak_bytes": card["memory"]["peak_bytes"],
        "step_seconds_median": card["throughput"]["step_seconds_median"],
        "code": card["code"],
    }


def changed(rows):
    """The seeds whose scores are not the same under every mode."""
    scores = {}
    for row in rows:
        scores.setdefault(row["seed"], set()).add(json.dumps(row["metrics"], sort_keys=True))
    return sorted(seed for seed, found in scores.items() if len(found) > 1)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, default=Path("outputs/benchmark_quickstart"))
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--out", type=Path, default=RESULTS / "quickstart_cpu.json")
    parser.add_argument("overrides", nargs="*", help="for a try, such as trainer.max_steps=2")
    options = parser.parse_args()
    rows = []
    for seed in options.seeds:
        for mode in MODES:
            found = card_of(options.runs / f"{mode}_{seed}", mode, seed, options.overrides)
            rows.append(row_of(found))
    steps = json.loads((options.runs / f"none_{options.seeds[0]}" / "run_card.json").read_text())["config"]
    config = {"experiment": "quickstart", "max_steps": steps["trainer"]["max_steps"]}
    config["precision"] = steps["precision"]
    write_json(options.out, {**provenance(config), "rows": rows, "changed": changed(rows)})
    if changed(rows):
        print(f"a mode changes the scores of seed {', '.join(map(str, changed(rows)))}", file=sys.stderr)
    return 1 if changed(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
