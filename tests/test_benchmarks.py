"""The suites stay alive: each runs at a tiny size, and every figure in the pages comes from a result."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import seg4k

ROOT = Path(seg4k.__file__).parent.parent
sys.path.append(str(ROOT / "benchmarks"))

import render  # noqa: E402


def run(tmp_path, script, *arguments, timeout=300):
    command = [sys.executable, str(ROOT / "benchmarks" / script), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result


def suite(tmp_path, name):
    printed = run(tmp_path, "run.py", "--suite", name, "--quick", "--out", str(tmp_path)).stdout
    result = json.loads((tmp_path / render.SUITES[name]).read_text())
    assert {"command", "date", "config", "code", "environment", "device", "threads"} <= set(result)
    return printed, result


def test_the_trace_suite(tmp_path):
    import peers_4k
    from provenance import provenance

    work, more = peers_4k.quick()
    result = {**provenance({}), **peers_4k.suite(work, peers_4k.device_named("rtx4090"), **more)}
    (tmp_path / render.SUITES["trace"]).write_text(json.dumps(result))
    rows = result["rows"]
    plain, timm = rows["timm + smp, as it is"], rows["timm set_grad_checkpointing"]
    assert timm["peak_bytes"] < plain["peak_bytes"]
    assert timm["flops"] > plain["flops"]
    assert rows["seg4k selective, loss by strips"]["peak_bytes"] < timm["peak_bytes"]
    assert result["modes"]["none"]["flops"] == plain["flops"]  # the peer does the same work
    assert result["floor"]["static_bytes"] == pytest.approx(plain["static_bytes"], rel=1e-3)
    assert result["floor"]["peak_bytes"] < rows["seg4k least memory, loss by strips"]["peak_bytes"]
    assert "does not run on fake tensors" in render.four_k_tables(result)
    assert set(render.tables(tmp_path)) >= {"4k", "limits", "growth", "planning", "modes", "anatomy"}


def test_the_gpu_suite_runs_dry_and_prints_its_table_last(tmp_path):
    printed, result = suite(tmp_path, "gpu")
    assert [row for row in result["skipped"] if "largest" not in row["name"]] == []
    agreement = {row["mode"]: row for row in result["agreement"]}
    assert set(agreement) == {"none, run again", "stage", "block", "layer", "selective"}
    assert all(row["equal"] for row in agreement.values())  # the CPU is deterministic
    assert all(row["largest_difference"] == 0 for row in result["parity"])
    rows = {(row["batch"], row["mode"]): row for row in result["rows"]}
    assert len(rows) == 2 * 7
    assert rows[1, "auto, 24 GiB"]["status"] == "completed"
    assert rows[1, "auto, 1 MiB"]["status"] == "no plan fits"
    done = [row for row in result["rows"] if row["status"] == "completed"]
    assert all(row["peak_bytes"] and row["predicted_bytes"] and row["slowdown"] for row in done)
    assert {row["mode"] for row in result["largest"]} == {"none", "stage", "selective"}
    last = printed.rstrip().splitlines()[-1]
    assert last.startswith("| 2 | auto, 24 GiB |")


def test_a_gpu_suite_without_time_still_prints():
    import gpu

    found = gpu.run(replace(gpu.DRY, seconds=0.0))
    assert found["rows"] == []
    assert {row["why"] for row in found["skipped"]} == {"the time was up"}
    assert "| modes at batch 2 | the time was up |" in render.gpu_tables(found)


def test_a_gpu_suite_without_a_gpu_says_so():
    import gpu

    if not torch.cuda.is_available():
        assert "no CUDA device" in render.gpu_tables(gpu.run(gpu.FULL))


@pytest.mark.parametrize(
    ("words", "fits_not"),
    [
        ("CUDA out of memory", True),
        ("GET was unable to find an engine to execute this computation", True),
        ("FIND was unable to find an engine to execute this computation", True),
        ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)", True),
        ("mat1 and mat2 shapes cannot be multiplied", False),
    ],
)
def test_a_batch_for_which_a_library_finds_no_room_does_not_fit(monkeypatch, words, fits_not):
    import gpu

    class Trainee:
        def __init__(self, settings, work):
            self.batch, self.model = work.batch, SimpleNamespace(segments=dict)

        def plan(self, plan):
            pass

        def peak(self):
            if self.batch > 3:
                raise (torch.OutOfMemoryError if "out of memory" in words else RuntimeError)(words)
            return 0, None

    monkeypatch.setattr(gpu, "Trainee", Trainee)
    check = gpu.Check(gpu.DRY)
    if fits_not:
        assert gpu.try_batches(check, "none", 2, gpu.GIB) == 3
        assert gpu.try_batches(check, "none", 6, gpu.GIB) == 3
    else:
        with pytest.raises(RuntimeError, match=words):
            gpu.try_batches(check, "none", 2, gpu.GIB)


@pytest.mark.slow
def test_the_trace_suite_as_a_command(tmp_path):
    printed, _ = suite(tmp_path, "trace")
    assert "| `none` |" in printed


@pytest.mark.slow
def test_the_cpu_suite(tmp_path):
    printed, result = suite(tmp_path, "cpu")
    rows = result["peers"]["rows"]
    assert all("failed" not in row for row in rows.values())
    assert all(row["loss_difference"] == 0 and row["gradients_equal"] for row in rows.values())
    assert rows["seg4k none"]["loss_difference_to_baseline"] < 1e-5
    assert rows["seg4k none"]["flops"] == rows["timm + smp, as it is"]["flops"]
    assert rows["timm set_grad_checkpointing"]["granularity"] == {"block": 6}
    assert "import seg4k" in printed


def test_what_training_reads_beside_a_bare_decode(tmp_path):
    import cv2
    import input as reading

    threads = cv2.getNumThreads()
    found = reading.throughput(tmp_path, pairs=2, rounds=1, height=64, width=96)
    assert cv2.getNumThreads() == threads
    rows = found["rows"]
    assert list(rows)[:3] == ["bare decode", "whole", "32 crops"]
    assert rows["bare decode"]["ratio"] == 1
    assert all(0 < row["ratio"] < 1 for name, row in rows.items() if name != "bare decode")
    assert "| bare decode |" in render.input_table(found)


@pytest.mark.slow
def test_every_peer_at_a_tiny_size(tmp_path):
    pytest.importorskip("transformers")
    out = tmp_path / "peers.json"
    sizes = ("--encoder", "test_vit", "--size", "64", "--repeats", "1", "--warmup", "0")
    run(tmp_path, "peers.py", *sizes, "--backend", "aot_eager_decomp_partition", "--out", str(out))
    rows = json.loads(out.read_text())["rows"]
    assert {name for name, row in rows.items() if "failed" in row} == set()
    lost = rows["torch wrapper around each part, reentrant"]["gradients_missing"]
    assert lost
    assert all(name.startswith("neck.stride2") for name in lost)
    assert rows["torch wrapper around each layer"]["buffers_different"] > 0  # BatchNorm counts twice
    assert rows["transformers gradient_checkpointing_enable"]["granularity"] == {"block": 6}


@pytest.mark.slow
def test_one_step(tmp_path):
    sizes = ("--encoder", "test_vit", "--height", "64", "--width", "96", "--budget", "8MiB", "--compare")
    printed = run(tmp_path, "one_step_4k.py", *sizes).stdout
    assert "equal to none, bit for bit: True" in printed


@pytest.mark.slow
def test_the_pictures_of_the_docs(tmp_path):
    run(tmp_path, "pictures.py", "--quick", "--out", str(tmp_path))
    assert {path.name for path in tmp_path.glob("*.png")} == {"granularity.png", "memory_4k.png"}


def test_the_pages_say_what_the_results_say():
    found = render.tables(render.RESULTS)
    for page in render.PAGES:
        text = (ROOT / page).read_text()
        assert render.rendered(text, found) == text, f"{page}: run python benchmarks/render.py"


def test_a_page_is_rendered_between_its_markers_only():
    end = "<!-- end of table -->"
    page = f"before\n<!-- table: a -->\nold\n{end}\n<!-- table: b -->\nkept\n{end}\n"
    once = render.rendered(page, {"a": "| new |"})
    assert once == page.replace("old", "| new |")
    assert render.rendered(once, {"a": "| new |"}) == once


def test_traced_against_measured(tmp_path):
    out = tmp_path / render.SINGLE["ledger"]
    sizes = ("--encoder", "test_vit", "--sizes", "64", "--modes", "none", "stage", "--precisions", "fp32")
    run(tmp_path, "trace_vs_ledger.py", *sizes, "--losses", "ce", "--out", str(out))
    result = json.loads(out.read_text())
    assert str(ROOT) not in result["commands"][0]
    assert [row["mode"] for row in result["runs"]] == ["none", "stage"]
    lowest, highest = (result["summary"]["fp32"][key] for key in ("lowest", "highest"))
    assert -0.01 <= lowest <= highest <= 0.03
    found = render.tables(tmp_path)
    assert "2 runs in fp32" in found["ledger-line"]
    assert "| test_vit | 64x64 | fp32 | CE | `stage` |" in found["ledger"]


def test_what_fails_is_a_row():
    row = {"failed": "RuntimeError: no"}
    base = {"peak_bytes": 2**20, "flops": 10**9, "peak_at": "loss forward"}
    floor = {"peak_bytes": 2**19, "flops": 10**9, "segment": "head"}
    table = render.four_k_table({"rows": {"one": base, "two": row}, "floor": floor})
    assert "| two | RuntimeError: no |" in table
    assert "| one | 1.0 MiB | 1.000 |" in table
    gpu = {"batch": 4, "mode": "none", "status": "out of memory", "predicted_bytes": 2**30}
    assert "| 4 | none | out of memory | 1.00 GiB |" in render.gpu_modes({"rows": [gpu]})


@pytest.mark.slow
def test_scores_and_peaks_of_quickstart(tmp_path):
    from tests.helpers import make_folder

    root, out = make_folder(tmp_path / "data"), tmp_path / render.SINGLE["quickstart"]
    words = ["data=folder", f"data.root={root}", "data.image_size=[32,48]", "trainer.max_steps=4"]
    words += ["trainer.val_every_steps=4", "loss.class_weights=null", "data.num_workers=0"]
    words += ["data.rare_crop_share=0"]
    arguments = ("--runs", str(tmp_path / "runs"), "--seeds", "3", "--out", str(out), *words)
    run(tmp_path, "quickstart.py", *arguments)
    result = json.loads(out.read_text())
    assert result["changed"] == []
    none, stage = result["rows"]
    assert (none["mode"], stage["mode"], none["seed"]) == ("none", "stage", 3)
    assert none["metrics"] == stage["metrics"]
    assert none["peak_bytes"] > stage["peak_bytes"] > 0
    found = render.tables(tmp_path)["quickstart"]
    assert "| seed | mIoU | left | right | nowhere |" in found
    assert found.splitlines()[2].endswith("| equal |")
    # Complete runs are not repeated, and a score that a mode changes is told.
    card = tmp_path / "runs" / "stage_3" / "run_card.json"
    card.write_text(json.dumps(json.loads(card.read_text()) | {"metrics": {"val_miou": 0.0, "val_iou": {}}}))
    with pytest.raises(AssertionError, match="a mode changes the scores of seed 3"):
        run(tmp_path, "quickstart.py", *arguments)
    assert "**differ**" in render.tables(tmp_path)["quickstart"]


@pytest.mark.parametrize("page", ["README.md", "benchmarks/README.md"])
def test_no_table_of_figures_is_typed_by_hand(page):
    text = re.sub(r"<!-- table: .*?<!-- end of table -->", "", (ROOT / page).read_text(), flags=re.DOTALL)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    measured = [row for row in rows if re.search(r"\d (MiB|GiB|s|TFLOP)\b|\d%|\| 0\.\d", row)]
    assert measured == []
