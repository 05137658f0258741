"""Turn the results in benchmarks/results/ into the tables of benchmarks/README.md and README.md.

python benchmarks/render.py            write the tables
python benchmarks/render.py --check    exit 1 if a table is not what its result says

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`; nobody types its figures.
"""

import argparse
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
GIB, MIB = 2**30, 2**20
SUITES = {"cpu": "suite_cpu.json", "trace": "suite_trace.json", "gpu": "suite_gpu.json"}
SINGLE = {
    "ledger": "trace_vs_ledger_cpu.json",
    "one-step": "one_step_4k.json",
    "quickstart": "quickstart_cpu.json",
    "modes": "modes_cpu.json",
    "guards": "guards_cpu.json",
    "frontier": "frontier.json",
}


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "| " + " | ".join("---" for _ in head) + " |"]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)])


def size(value):
    if value is None:
        return ""
    return f"{value / GIB:.2f} GiB" if value >= GIB else f"{value / MIB:.1f} MiB"


def work(flops):
    return f"{flops / 1e12:.1f} TFLOP" if flops >= 1e12 else f"{flops / 1e9:.1f} GFLOP"


def more(value, base):
    """How much more than the base, as a percentage."""
    return "" if not base else f"{value / base - 1:+.1%}"


def source(result, work_said=True):
    """The line below a table: of what it is, how it was made, where and when."""
    versions = result["environment"]
    names = ("torch", "timm", "segmentation-models-pytorch", "transformers")
    shown = ", ".join(f"{name} {versions[name]}" for name in names if name in versions)
    sha, dirty = result["code"]["git_sha"], result["code"]["dirty"]
    config = result["config"]
    if work_said and "encoder" in config:
        said = f"{config['encoder']} + U-Net, {config['width']}x{config['height']}, batch {config['batch']}, "
        said += f"{config['precision']}, {config['classes']} classes. "
    else:
        said = ""
    code = f"seg4k {result['code']['version']}" + (f" at {sha[:8]}" if sha else "")
    return (
        f"{said}`{result['command']}`, {result['date']}, {result['device']['name']} ({result['processor']}), "
        f"{result['threads']} threads; {shown}; {code}{' with changes' if dirty else ''}."
    )


def peers_table(result):
    rows = []
    for name, row in result["rows"].items():
        if "failed" in row:
            rows.append([name, row["failed"], "", "", "", "", "", ""])
            continue
        base = result["rows"][row["baseline"]]
        ratio = spread = ""
        if row.get("ratio") is not None:
            ratio = f"{row['ratio']:.3f}"
            low, high = row["iqr_seconds"]
            spread = f"{row['median_seconds']:.2f} s ({low:.2f} to {high:.2f})"
        rows.append(
            [
                name,
                granularity(row["granularity"]),
                size(row["peak_bytes"]),
                f"{row['peak_ratio']:.3f}",
                more(row["flops"], base["flops"]) if row["flops"] else "not counted",
                spread,
                ratio,
                verdict(row),
            ]
        )
    head = ("arm", "regions", "peak", "of its baseline", "work", "step", "time ratio", "result")
    return table(head, rows)


def granularity(counts):
    if counts is None:
        return "chosen by the compiler"
    names = {"layer": "layers", "block": "blocks", "blocks": "groups of blocks", "other": "others"}
    return ", ".join(f"{count} {names.get(kind, kind)}" for kind, count in counts.items()) or "none"


def verdict(row):
    """What became of losses, gradients and buffers, against the same model without checkpointing."""
    said = []
    if row["loss_difference"] == 0:
        said.append("losses equal")
    else:
        said.append(f"losses differ by {row['loss_difference']:.1e}")
    if row.get("loss_difference_to_baseline", 0) > row["loss_difference"]:
        said.append(f"within {row['loss_difference_to_baseline']:.1e} of {row['baseline'].split(',')[0]}")
    if row["gradients_missing"]:
        said.append(f"**{len(row['gradients_missing'])} parameters get no gradient**")
    elif row["gradients_equal"]:
        said.append("gradients bit-equal")
    else:
        said.append(f"gradient norms within {row['gradient_norms_differ_by']:.1e}")
    if row["buffers_different"]:
        said.append(f"**{row['buffers_different']} buffers differ**")
    return ", ".join(said)


def four_k_table(result):
    rows = []
    base = next(row for row in result["rows"].values() if "failed" not in row)
    for name, row in result["rows"].items():
        if "failed" in row:
            rows.append([name, row["failed"], "", "", "", ""])
            continue
        rows.append(
            [
                name,
                size(row["peak_bytes"]),
                f"{row['peak_bytes'] / base['peak_bytes']:.3f}",
                work(row["flops"]),
                more(row["flops"], base["flops"]),
                row["peak_at"],
            ]
        )
    floor = result["floor"]
    rows.append(
        [
            f"floor: parameters, gradients, optimizer and {floor['segment']} alone",
            size(floor["peak_bytes"]),
            f"{floor['peak_bytes'] / base['peak_bytes']:.3f}",
            work(floor["flops"]),
            "",
            "",
        ]
    )
    return table(("arm", "peak", "of the first", "work of a step", "more work", "peak at"), rows)


def modes_table(result):
    base = result["modes"]["none"]
    rows = [
        [
            f"`{mode}`",
            row["regions"],
            size(row["peak_bytes"]),
            f"{row['peak_bytes'] / base['peak_bytes']:.2f}",
            more(row["flops"], base["flops"]),
            row["peak_at"],
        ]
        for mode, row in result["modes"].items()
    ]
    return table(("mode", "regions", "peak", "of `none`", "more work", "peak at"), rows)


def anatomy_table(result):
    rows = []
    for name, part in result["anatomy"]["segments"].items():
        share = f"{part['attention_flops'] / part['flops']:.0%}" if part["attention_flops"] else ""
        rows.append([f"`{name}`", size(part["saved_bytes"]), work(part["flops"]), share])
    return table(("segment", "held for backward", "forward work", "of it attention"), rows)


def kinds_table(result):
    modes = {mode: row for mode, row in result["modes"].items() if mode in ("none", "stage", "selective")}
    kinds = [
        kind for kind in modes["none"]["peak_kinds"] if any(r["peak_kinds"][kind] for r in modes.values())
    ]
    rows = [[kind, *(size(row["peak_kinds"][kind]) for row in modes.values())] for kind in kinds]
    rows.append(["the peak", *(size(row["peak_bytes"]) for row in modes.values())])
    rows.append(["where", *(row["peak_at"] for row in modes.values())])
    return table(("at the peak", *(f"`{mode}`" for mode in modes)), rows)


def limits_table(result):
    budgets = list(next(iter(result["limits"].values()), {}))
    head = ["arm", *(f"batch in {b} GiB" for b in budgets), *(f"image in {b} GiB" for b in budgets)]
    rows = []
    for name, found in result["limits"].items():
        batches = [str(found[b]["batch"] or "none") for b in budgets]
        images = [
            f"{found[b]['width']}x{found[b]['height']}" if found[b]["height"] else "none" for b in budgets
        ]
        rows.append([name, *batches, *images])
    return table(head, rows)


def growth_table(result):
    sizes = [(p["height"], p["width"]) for p in next(iter(result["growth"].values()), [])]
    head = ("arm", *(f"{width}x{height}" for height, width in sizes))
    rows = []
    for name, points in result["growth"].items():
        cells = []
        for point in points:
            pixels = point["height"] * point["width"]
            held = (point["peak_bytes"] - point["static_bytes"]) / pixels
            cells.append(f"{held:,.0f} B, {point['flops'] / pixels / 1e6:.1f} MFLOP")
        rows.append([name, *cells])
    return table(head, rows)


def planning_line(result):
    found = result["planning"]
    return (
        f"`activation_checkpointing=auto` planned in {found['seconds']:.1f} s, in {found['traces']} traces; "
        f"its floor, starting a process and tracing the step once, took {found['floor_seconds']:.1f} s."
    )


def four_k_tables(result):
    parts = [
        modes_table(result),
        anatomy_table(result),
        kinds_table(result),
        four_k_table(result),
        limits_table(result),
        growth_table(result),
        planning_line(result),
    ]
    return "\n\n".join(parts)


def overheads_table(result):
    rows = [
        [
            name,
            f"{row['seconds']:.2f} s",
            f"{row['floor_seconds']:.2f} s",
            f"{row['seconds'] / row['floor_seconds']:.2f}",
        ]
        for name, row in result["start_up"].items()
    ]
    check = result["validation"]
    what = f"validating one {check['width']}x{check['height']} image, {check['encoder']}"
    rows.append(
        [
            f"{what}: time; floor: the forward pass alone",
            f"{check['seconds']:.2f} s",
            f"{check['floor_seconds']:.2f} s",
            f"{check['seconds'] / check['floor_seconds']:.2f}",
        ]
    )
    rows.append(
        [
            f"{what}: peak; floor: parameters, image, mask and the head's features",
            size(check["peak_bytes"]),
            size(check["floor_bytes"]),
            f"{check['peak_bytes'] / check['floor_bytes']:.2f}",
        ]
    )
    return table(("what", "seg4k", "floor", "ratio"), rows)


def input_table(result):
    rows = [
        [name, f"{row['samples_per_second']:.2f}", f"{row['ratio']:.2f}"]
        for name, row in result["rows"].items()
    ]
    return table(("arm", "samples/s, one process", "of the bare decode"), rows)


def cpu_tables(result):
    overheads = result["overheads"]
    tables = (peers_table(result["peers"]), overheads_table(overheads), input_table(overheads["input"]))
    return "\n\n".join(tables)


def gpu_tables(result):
    parts = []
    if result["agreement"]:
        rows = [
            [
                row["mode"],
                "bit-equal" if row["equal"] else f"relative error {row['relative_error']:.1e}",
                f"{row['loss_difference']:.1e}",
            ]
            for row in result["agreement"]
        ]
        parts.append(table(("fp32 gradients against none", "gradients", "loss"), rows))
    if result["parity"]:
        rows = [
            [row["mode"], row["steps"], f"{row['last_loss']:.4f}", f"{row['largest_difference']:.1e}"]
            for row in result["parity"]
        ]
        parts.append(table(("bf16 losses against none", "steps", "last loss", "largest difference"), rows))
    if result["largest"]:
        rows = [
            [row["mode"], size(row["card_bytes"]), size(row["reserve_bytes"]), row["planned"], row["tried"]]
            for row in result["largest"]
        ]
        parts.append(table(("largest batch", "card", "reserve", "by plan", "by trial"), rows))
    if result["skipped"]:
        rows = [[row["name"], row["why"]] for row in result["skipped"]]
        parts.append(table(("skipped", "why"), rows))
    if result["rows"]:
        parts.append(gpu_modes(result))
    return "\n\n".join(parts)


def gpu_modes(result):
    rows = []
    for row in result["rows"]:
        peak, predicted = row.get("peak_bytes"), row.get("predicted_bytes")
        rate, slow = row.get("samples_per_second"), row.get("slowdown")
        rows.append(
            [
                row["batch"],
                row["mode"],
                size(peak) if peak else row["status"],
                size(predicted),
                f"{peak / predicted - 1:+.2%}" if peak and predicted else "",
                size(row.get("reserved_bytes")),
                f"{rate:.3f}" if rate else "",
                f"{slow:.3f}" if slow else "",
            ]
        )
    head = ("batch", "mode", "allocator peak", "predicted", "error", "reserved", "images/s", "slowdown")
    return table(head, rows)


README_ROWS = {  # the arm, its name in the traced suite, and in the measured one
    "timm + smp, no checkpointing": ("timm + smp, as it is", "timm + smp, as it is"),
    "timm `set_grad_checkpointing`": ("timm set_grad_checkpointing", "timm set_grad_checkpointing"),
    "torch's wrapper around each layer": (
        "torch wrapper around each layer",
        "torch wrapper around each layer",
    ),
    "seg4k `stage`": ("seg4k stage", "seg4k stage"),
    "seg4k `selective`": ("seg4k selective, loss by strips", "seg4k selective"),
    "seg4k `auto`, 8 GiB": ("seg4k auto for 8 GiB, loss by strips", None),
}


def readme_table(trace, cpu):
    """The few rows that README shows: traced at 4K, and the step time measured on the CPU."""
    base = trace["rows"]["timm + smp, as it is"]
    size_of = cpu["config"]
    encoder = {"vit_base": "ViT-B", "vit_small": "ViT-S", "vit_tiny": "ViT-Ti"}.get(
        "_".join(size_of["encoder"].split("_")[:2]), size_of["encoder"]
    )
    head = [
        "3840x2160, batch 1",
        "peak, traced",
        "of the first",
        "more work",
        "batch in 24 GiB",
        f"step time on the CPU, {encoder} at {size_of['width']}x{size_of['height']}",
    ]
    rows = []
    for name, (traced, measured) in README_ROWS.items():
        row, times = trace["rows"].get(traced), cpu["peers"]["rows"].get(measured, {})
        if row is None or "failed" in row:
            continue
        limit = trace["limits"].get(traced, {}).get("24")
        ratio = times.get("ratio")
        rows.append(
            [
                name,
                size(row["peak_bytes"]),
                f"{row['peak_bytes'] / base['peak_bytes']:.2f}",
                more(row["flops"], base["flops"]),
                limit["batch"] if limit else "",
                f"{ratio:.2f}" if ratio else "",
            ]
        )
    return table(head, rows)


def ledger_table(result):
    rows = [
        [
            run["encoder"],
            f"{run['size'][1]}x{run['size'][0]}",
            run["precision"],
            {"ce": "CE", "ce_dice": "CE + Dice"}[run["loss"]],
            f"`{run['mode']}`",
            f"{run['measured_bytes'] / MIB:.1f}",
            f"{run['traced_bytes'] / MIB:.1f}",
            f"{run['ratio']:+.2%}",
        ]
        for run in result["runs"]
    ]
    head = ("encoder", "size", "precision", "loss", "mode", "measured, MiB", "traced, MiB", "difference")
    return table(head, rows)


def ledger_line(result):
    """How far the traced peaks lie from the measured ones, in one sentence."""
    said = [
        f"{found['runs']} runs in {precision}: {found['lowest']:+.2%} to {found['highest']:+.2%}"
        for precision, found in result["summary"].items()
    ]
    versions, code = result["environment"], result["code"]
    return (
        f"{'; '.join(said)}. `python benchmarks/trace_vs_ledger.py`, {result['date']}, "
        f"{result['device']['name']} ({result['processor']}), {result['threads']} threads; "
        f"torch {versions['torch']}, timm {versions['timm']}; seg4k {code['version']}"
        f"{' at ' + code['git_sha'][:8] if code['git_sha'] else ''}."
    )


def one_step_line(result):
    step = result["steps"]["auto"]
    return (
        f"Largest resident set {size(step['rss_bytes'])}, {size(step['rss_before_bytes'])} of it before the "
        f"step (Python, libraries, parameters, the batch); planned {size(result['predicted_bytes'])} of "
        f"tensors, where recomputing nothing holds {size(result['none_bytes'])}; loss {step['loss']:.6f}."
    )


def made(result):
    """How a single script's result was made, where, when and by what."""
    versions, code = result["environment"], result["code"]
    where = result["device"]["name"] + (f" ({result['processor']})" if "processor" in result else "")
    return (
        f"`{result['command']}`, {result['date']}, {where}; "
        f"torch {versions['torch']}, timm {versions['timm']}; "
        f"seg4k {code['version']}{' at ' + code['git_sha'][:8] if code['git_sha'] else ''}."
    )


def quickstart_table(result):
    """Of each seed the scores, which no mode changes, and the peak of each mode."""
    seeds = sorted({row["seed"] for row in result["rows"]})
    modes = list(dict.fromkeys(row["mode"] for row in result["rows"]))
    rows = []
    for seed in seeds:
        runs = {row["mode"]: row for row in result["rows"] if row["seed"] == seed}
        scores = runs[modes[0]]["metrics"]
        same = "equal" if seed not in result["changed"] else "**differ**"
        peaks = [size(runs[mode]["peak_bytes"]) for mode in modes]
        iou = [f"{value:.3f}" for value in scores["val_iou"].values()]
        rows.append([seed, f"{scores['val_miou']:.4f}", *iou, *peaks, same])
    classes = list(result["rows"][0]["metrics"]["val_iou"])
    head = [
        "seed",
        "mIoU",
        *classes,
        *(f"peak, `{mode}`" for mode in modes),
        "scores of the modes, bit for bit",
    ]
    return table(head, rows)


def modes_cpu_table(result):
    rows = []
    for name, row in result["rows"].items():
        again = row["recompute_flops"]
        share = "" if again is None else f"{again / 1e9:.1f} ({again / row['forward_flops']:.1%})"
        rows.append(
            [
                name,
                row["segments"],
                f"{row['saved_bytes'] / MIB:.0f} MiB",
                share,
                f"{row['median_seconds']:.2f}",
                f"{row['ratio']:.3f}",
            ]
        )
    head = (
        "mode",
        "segments",
        "saved for backward",
        "recompute, GFLOP (of forward)",
        "step, s",
        "time ratio",
    )
    return table(head, rows)


def guards_line(result):
    rows = result["rows"]
    off, always = rows["seg4k, audit=off"], rows["seg4k, audit=always"]
    first, third = off["ratio_iqr"]
    return (
        f"The guards of every step cost {off['ratio'] - 1:+.1%} of it beside `torch.utils.checkpoint` alone "
        f"around the same segments (quartiles {first - 1:+.1%} to {third - 1:+.1%}), the audit of the first "
        f"step {always['ratio'] - 1:+.1%} of that step."
    )


FRONTIER_ROWS = ("none", "decoder", "encoder", "block", "stage", "selective")


def frontier_table(result):
    """Peak, work and time of the uniform modes, and of `auto` at some of its budgets."""
    named = [(f"`{mode}`", result["modes"][mode]) for mode in FRONTIER_ROWS]
    smallest, *others = sorted(result["auto"], key=lambda row: row["budget_bytes"])
    chosen = [others[0], smallest]
    named += [(f"`auto`, budget {size(row['budget_bytes'])}", row) for row in chosen]
    rows = [
        [name, size(row["peak_bytes"]), f"{row['added_flops']:+.1%}", f"{row['added_time']:+.1%}"]
        for name, row in named
    ]
    return table(("plan", "peak", "more work", "more time, estimated"), rows)


def load(suite, results):
    path = results / (SUITES | SINGLE)[suite]
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def tables(results):
    """Every table that the results at hand make, by name."""
    cpu, trace, gpu = (load(name, results) for name in SUITES)
    single = {name: load(name, results) for name in SINGLE}
    ledger, one_step = single["ledger"], single["one-step"]
    found = {}
    if cpu:
        found["peers"] = f"{peers_table(cpu['peers'])}\n\n{source(cpu)}"
    if cpu and "overheads" in cpu:
        line = source(cpu, False)
        found["overheads"] = f"{overheads_table(cpu['overheads'])}\n\n{line}"
        found["input"] = f"{input_table(cpu['overheads']['input'])}\n\n{line}"
    if trace:
        line = source(trace)
        found["4k"] = f"{four_k_table(trace)}\n\n{line}"
        found["limits"] = f"{limits_table(trace)}\n\n{line}"
        found["growth"] = f"{growth_table(trace)}\n\n{line}"
        found["planning"] = planning_line(trace)
        found["modes"] = f"{modes_table(trace)}\n\n{line}"
        found["anatomy"] = f"{anatomy_table(trace)}\n\n{line}"
        found["kinds"] = kinds_table(trace)
    if cpu and trace:
        found["readme"] = f"{readme_table(trace, cpu)}\n\n{source(trace)}"
    if gpu:
        found["gpu"] = f"{gpu_tables(gpu)}\n\n{source(gpu)}"
    if ledger:
        found["ledger"] = f"{ledger_table(ledger)}\n\n{ledger_line(ledger)}"
        found["ledger-line"] = ledger_line(ledger)
    if one_step:
        found["one-step"] = f"{one_step_line(one_step)} {source(one_step)}"
    if single["quickstart"]:
        quickstart = single["quickstart"]
        found["quickstart"] = f"{quickstart_table(quickstart)}\n\n{made(quickstart)}"
    if single["modes"]:
        found["modes-cpu"] = f"{modes_cpu_table(single['modes'])}\n\n{made(single['modes'])}"
    if single["guards"]:
        found["guards"] = f"{guards_line(single['guards'])} {made(single['guards'])}"
    if single["frontier"]:
        frontier = single["frontier"]
        line = made({**frontier, "device": {"name": f"for {frontier['device']}, without a GPU"}})
        found["plans-4k"] = f"{frontier_table(frontier)}\n\n{frontier['title']}. {line}"
    return found


def rendered(text, found):
    """A page with its tables renewed; a table without a result stays as it is."""

    def renew(match):
        name = match["name"]
        return f"<!-- table: {name} -->\n{found[name]}\n<!-- end of table -->" if name in found else match[0]

    pattern = r"<!-- table: (?P<name>[\w-]+) -->\n.*?<!-- end of table -->"
    return re.sub(pattern, renew, text, flags=re.DOTALL)


PAGES = ("README.md", "benchmarks/README.md", "docs/granularity.md", "docs/memory_4k.md", "docs/modes.md")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    found, stale = tables(options.results), []
    for page in PAGES:
        path = ROOT / page
        text = path.read_text(encoding="utf-8")
        new = rendered(text, found)
        if new != text:
            stale.append(page)
            if not options.check:
                path.write_text(new, encoding="utf-8")
    if options.check and stale:
        print(f"not what the results say: {', '.join(stale)}. Run python benchmarks/render.py")
        sys.exit(1)


if __name__ == "__main__":
    main()
