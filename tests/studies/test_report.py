import json
import math
import shutil

import pytest

from seg4k.errors import UserError
from seg4k.studies.report import make_report, write_report

GIB = 2**30
RUN_KEYS = {"dir", "mode", "seed", "status", "peak_bytes", "samples_per_second", "val_miou"}
MODE_KEYS = {"mode", "runs", "peak_ratio", "slowdown", "miou_delta_max", "parity"}
CPU = {"precision": "32-true", "memory__peak_source": "cpu_allocator"}


def sweep(run, modes=("none", "stage", "block", "layer", "selective"), seeds=range(3), **changes):
    for mode in modes:
        for seed in seeds:
            run(mode, seed, **changes)


def rows(report):
    return {row["label"]: row for row in report["modes"]}


def test_contract(run, tmp_path):
    sweep(run)
    report = make_report(tmp_path)
    assert (report["schema"], report["baseline_mode"]) == (1, "none")
    assert [(one["mode"], one["seed"]) for one in report["runs"][:4]] == [
        ("none", 0),
        ("none", 1),
        ("none", 2),
        ("stage", 0),
    ]
    assert all(one.keys() >= RUN_KEYS for one in report["runs"])
    assert [row["mode"] for row in report["modes"]] == ["none", "stage", "block", "layer", "selective"]
    assert all(row.keys() >= MODE_KEYS and row["runs"] == 3 for row in report["modes"])
    assert report["pareto"] == ["none", "selective", "stage", "layer"]
    json.dumps(report, allow_nan=False)


def test_values_are_medians_of_paired_ratios(run, tmp_path):
    for seed, (base, speed, peak) in enumerate([(1.0, 0.5, 10), (2.0, 1.6, 11), (4.0, 1.0, 12)]):
        run("none", seed, throughput__samples_per_second=base, memory__peak_bytes=20 * GIB)
        run("stage", seed, throughput__samples_per_second=speed, memory__peak_bytes=peak * GIB)
    row = rows(make_report(tmp_path))["stage"]
    assert (
        row["slowdown"] == 2.0
    )  # of 2, 1.25 and 4; the ratio of the medians is 2 as well, that of sums 2.26
    assert row["slowdown_range"] == [1.25, 4.0]
    assert row["peak_ratio"] == pytest.approx(11 / 20)
    assert row["peak_bytes"] == 11 * GIB


def test_all_equal_is_exact(run, tmp_path):
    sweep(run, **CPU)
    report = make_report(tmp_path)
    assert {row["parity"] for row in report["modes"]} == {"exact"}
    assert {row["miou_delta_max"] for row in report["modes"]} == {0.0}
    assert report["notes"] == []


def test_planted_drift_is_outside_the_margin(run, tmp_path):
    sweep(run, modes=("none", "block"), **CPU)
    for seed, shift in enumerate((3e-3, -2e-3, 1e-3)):
        run("stage", seed, metrics__val_miou=0.62 + 0.01 * seed + shift, **CPU)
    report = make_report(tmp_path)
    assert rows(report)["stage"]["parity"] == "outside_margin"
    assert rows(report)["stage"]["miou_delta_max"] == pytest.approx(3e-3)
    (recommended,) = report["recommendations"]
    assert recommended["mode"] == "block"
    assert "Do not use `stage`" in recommended["words"]
    accepted = {entry["mode"]: entry["accepted"] for entry in report["acceptance"]}
    assert accepted == {"stage": False, "block": True}


def test_same_scatter_on_a_gpu_is_inconclusive_and_says_how_many_seeds(run, tmp_path):
    sweep(run, modes=("none",))
    for seed, shift in enumerate((3e-3, -2e-3, 1e-3)):
        run("stage", seed, metrics__val_miou=0.62 + 0.01 * seed + shift)
    row = rows(make_report(tmp_path))["stage"]
    assert row["parity"] == "inconclusive"
    assert row["seeds_needed"] > 3
    assert f"{row['seeds_needed']:,} seeds" in row["parity_words"]
    assert rows(make_report(tmp_path, margin=0.05))["stage"]["parity"] == "within_margin"


def test_another_baseline(run, tmp_path):
    sweep(run, modes=("none", "stage"))
    report = make_report(tmp_path, baseline_mode="stage")
    assert rows(report)["none"]["peak_ratio"] == pytest.approx(19.9 / 7.0)
    assert rows(report)["stage"]["slowdown"] == 1.0


def test_unknown_baseline_and_margin(run, tmp_path):
    run()
    with pytest.raises(UserError, match="baseline mode 'nonsense'"):
        make_report(tmp_path, baseline_mode="nonsense")
    with pytest.raises(UserError, match="margin"):
        make_report(tmp_path, margin=-1)


def test_without_a_baseline(run, tmp_path):
    run("stage", 0)
    report = make_report(tmp_path)
    assert rows(report)["stage"]["peak_ratio"] is None
    assert rows(report)["stage"]["parity"] == "inconclusive"
    assert "no run of the baseline mode" in report["notes"][0]


def test_baseline_that_does_not_fit(run, tmp_path):
    for seed in range(2):
        run(
            "none",
            seed,
            status="out_of_memory",
            memory__peak_bytes=20 * GIB,
            throughput__samples_per_second=None,
            metrics={"val_miou": None, "val_iou": {}, "val_loss": None, "val_samples": 0},
        )
        run("decoder", seed)
        run("selective", seed)
    report = make_report(tmp_path)
    row = rows(report)["selective"]
    assert (row["peak_ratio"], row["slowdown"], row["parity"]) == (None, None, "inconclusive")
    assert row["peak_ratio_at_most"] == pytest.approx(7.6 / 20)
    assert "ran out of memory" in row["parity_words"]
    assert report["recommendations"][0]["mode"] == "selective"  # decoder is as fast, but holds more
    assert [entry["peak_down_30"] for entry in report["acceptance"]] == [None, True]
    assert "none" not in report["pareto"]


def test_failed_runs_are_rows_and_drop_out_of_pairs(run, tmp_path):
    sweep(run, modes=("none", "stage"))
    run("stage", 1, status="failed", error="boom", metrics__val_miou=0.1)
    report = make_report(tmp_path)
    row = rows(report)["stage"]
    assert (row["runs"], row["completed"], row["pairs"], row["parity"]) == (3, 2, 2, "exact")
    assert row["statuses"] == {"completed": 2, "failed": 1}
    assert "`stage`: 1 of 3 runs failed: boom." in report["notes"]


def test_resumed_sweep_reports_the_same(run, tmp_path):
    sweep(run)
    whole = tmp_path / "whole"
    shutil.copytree(tmp_path, whole, ignore=shutil.ignore_patterns("whole"))
    resumed = tmp_path / "resumed"
    for name in ("selective/seed=2", "none/seed=1", "block/seed=0"):  # another order of writing
        shutil.copytree(whole / name, resumed / name)
    killed = resumed / "layer" / "seed=1"
    killed.mkdir(parents=True)
    (killed / "metrics.csv").write_text("step,train_loss\n0,")
    write_report(resumed)
    shutil.copytree(whole, resumed, dirs_exist_ok=True)
    first, second = write_report(whole), write_report(resumed)
    assert first == second
    for name in ("report.json", "report.md", "report.html", "pareto.png"):
        assert (whole / name).read_bytes() == (resumed / name).read_bytes()
    assert str(tmp_path) not in (whole / "report.json").read_text()


def test_strategies_and_device_counts_are_arms(run, tmp_path):
    for mode in ("none", "stage"):
        for strategy, count, factor in (("SingleDeviceStrategy", 1, 1.0), ("DDPStrategy", 2, 1.8)):
            for seed in range(2):
                speed = factor * (1.0 if mode == "none" else 0.8)
                at = f"{mode}/{strategy}/seed={seed}"
                run(
                    mode,
                    seed,
                    at=at,
                    strategy=strategy,
                    device__count=count,
                    throughput__samples_per_second=speed,
                )
    report = make_report(tmp_path)
    assert [(row["mode"], row["strategy"], row["devices"]) for row in report["modes"]] == [
        ("none", "SingleDeviceStrategy", 1),
        ("none", "DDPStrategy", 2),
        ("stage", "SingleDeviceStrategy", 1),
        ("stage", "DDPStrategy", 2),
    ]
    ddp = rows(report)["stage · DDP x2"]
    assert ddp["samples_per_second"] == pytest.approx(1.44)
    assert ddp["samples_per_second_per_device"] == pytest.approx(0.72)
    assert ddp["slowdown"] == pytest.approx(1.25)  # against none under ddp
    assert report["pareto"] == ["none · SingleDevice x1", "stage · SingleDevice x1"]
    assert len(report["recommendations"]) == 2


def test_run_that_failed_before_it_had_a_strategy_stays_with_its_mode(run, tmp_path):
    sweep(run, modes=("none", "stage"))
    run("stage", 3, status="failed", strategy="not reached", device={"name": "not reached", "count": 0})
    assert list(rows(make_report(tmp_path))) == ["none", "stage"]


def test_settings_that_vary_within_a_mode_are_arms_coarse_to_fine(run, tmp_path):
    sweep(run, modes=("none",))
    for blocks in (1, 2, 4):
        for seed in range(3):
            settings = {"mode": "block", "blocks_per_segment": blocks}
            run("block", seed, at=f"block{blocks}/seed={seed}", config__activation_checkpointing=settings)
    report = make_report(tmp_path)
    assert list(rows(report)) == ["none", *(f"block (blocks_per_segment={n})" for n in (4, 2, 1))]
    assert [step["to"] for step in report["steps"]] == list(rows(report))[1:]


def test_what_else_was_swept_is_paired_apart(run, tmp_path):
    for number, lr in enumerate((1e-3, 1e-4)):
        for mode in ("none", "stage"):
            config = {
                "activation_checkpointing": {"mode": mode},
                "lr": lr,
                "out": f"/x/{mode}{number}/seed=0/y",
            }
            run(mode, 0, at=f"{mode}{number}/seed=0", config=config, metrics__val_miou=0.5 + number * 0.1)
    report = make_report(tmp_path)
    assert rows(report)["stage"]["pairs"] == 2
    assert rows(report)["stage"]["parity"] == "exact"
    assert report["notes"] == []


def test_comparison_of_unlike_runs_is_noted(run, tmp_path):
    run("none", 0)
    run("stage", 0, batch__effective=8, config__optimizer={"lr": 0.1})
    (note,) = make_report(tmp_path)["notes"]
    assert "batch.effective (4 / 8)" in note
    assert "optimizer.lr (0.001 / 0.1)" in note


def test_steps_in_words(run, tmp_path):
    speeds = {"none": 1.0, "stage": 0.8, "block": 0.7, "layer": 0.7}
    peaks = {"none": 20, "stage": 8, "block": 9, "layer": 8}
    for mode, speed in speeds.items():
        run(mode, 0, throughput__samples_per_second=speed, memory__peak_bytes=peaks[mode] * GIB)
    report = make_report(tmp_path)
    assert [(step["from"], step["to"], step["saved_bytes"] // GIB) for step in report["steps"]] == [
        ("none", "stage", 12),
        ("stage", "block", -1),
        ("block", "layer", 1),
    ]
    words = [step["words"] for step in report["steps"]]
    assert words[0] == "saves 12.0 GiB and costs 20% of throughput"
    assert words[1].endswith("too fine")
    assert words[2] == "saves 1.00 GiB, at the same throughput within its spread"
    assert report["steps"][0]["throughput_lost"] == pytest.approx(0.2)


def test_recommendation_prefers_the_fastest_that_saves_enough(run, tmp_path):
    sweep(run, modes=("none", "decoder", "stage", "selective"))
    (entry,) = make_report(tmp_path)["recommendations"]
    assert entry["mode"] == "selective"  # decoder saves 29%
    assert "19.9 GiB to 7.60 GiB (-62%)" in entry["words"]
    assert "`stage`" in entry["words"]


def test_recommends_nothing_where_little_is_saved(run, tmp_path):
    sweep(run, modes=("none", "decoder"))
    (entry,) = make_report(tmp_path)["recommendations"]
    assert entry["mode"] is None
    assert "Keep `none`: no other mode lowers the peak by 30%" in entry["words"]


def test_acceptance_refuses_too_slow(run, tmp_path):
    sweep(run, modes=("none", "layer", "stage"))
    entries = {entry["mode"]: entry for entry in make_report(tmp_path)["acceptance"]}
    assert entries["stage"]["accepted"] is True
    assert (entries["layer"]["slowdown_known"], entries["layer"]["slowdown_acceptable"]) == (True, False)
    assert entries["layer"]["accepted"] is False


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "much", 0, -1])
def test_senseless_measurements_are_absent(run, tmp_path, value):
    run("none", 0)
    run("stage", 0, memory__peak_bytes=value, throughput__samples_per_second=value)
    report = write_report(tmp_path)
    row = rows(report)["stage"]
    assert (row["peak_bytes"], row["samples_per_second"], row["peak_ratio"]) == (None, None, None)
    assert report["pareto"] == ["none"]
