import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

import seg4k
from seg4k.activation_checkpointing import segment_call
from seg4k.studies.report import make_report
from seg4k.training.train import train
from tests.helpers import make_folder, smoke

ROOT = Path(seg4k.__file__).parent.parent
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("data"))


def command(root, directory, *overrides):
    return [
        sys.executable,
        str(ROOT / "train.py"),
        "-m",
        "experiment=smoke",
        "data=folder",
        f"data.root={root}",
        "data.image_size=[32,48]",
        "data.val_size=null",
        f"hydra.sweep.dir={directory}",
        *overrides,
    ]


def sweep(root, directory, *overrides):
    return subprocess.run(
        command(root, directory, *overrides),
        cwd=directory.parent,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=500,
    )


POINTS = ("activation_checkpointing=none,stage", "seed=0,1")


@pytest.fixture(scope="module")
def finished(root, tmp_path_factory):
    directory = tmp_path_factory.mktemp("sweep") / "s"
    result = sweep(root, directory, *POINTS)
    assert result.returncode == 0, result.stderr
    return directory, result


def stable(report):
    """The report without what depends on the clock."""
    for run in report["runs"]:
        run.pop("samples_per_second")
    return {"runs": report["runs"], "parity": [(row["mode"], row["parity"]) for row in report["modes"]]}


def test_a_sweep_ends_with_its_report(finished):
    directory, result = finished
    cards = sorted(str(path.parent.relative_to(directory)) for path in directory.rglob("run_card.json"))
    assert cards == ["none/seed=0", "none/seed=1", "stage/seed=0", "stage/seed=1"]
    report = json.loads((directory / "report.json").read_text())
    assert {row["mode"]: row["parity"] for row in report["modes"]} == {"none": "exact", "stage": "exact"}
    assert {path.name for path in directory.iterdir()} >= {"report.md", "report.html", "pareto.png"}
    assert "| `stage` |" in result.stdout


def test_each_point_runs_in_a_fresh_process(finished):
    directory, _ = finished
    commands = {json.loads(path.read_text())["command"] for path in directory.rglob("run_card.json")}
    assert len(commands) == 4
    assert all(text.startswith("seg4k train") and " -m " not in text for text in commands)


def test_a_resumed_sweep_runs_only_what_is_missing(finished, root, tmp_path):
    directory, _ = finished
    copy = tmp_path / "s"
    shutil.copytree(directory, copy)
    shutil.rmtree(copy / "stage" / "seed=1")
    kept = {path: path.stat().st_mtime_ns for path in copy.rglob("run_card.json")}
    result = sweep(root, copy, *POINTS, "sweep.resume=true")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("done before") == 3
    assert all(path.stat().st_mtime_ns == time for path, time in kept.items())
    first, again = (json.loads((d / "report.json").read_text()) for d in (directory, copy))
    assert stable(first) == stable(again)


def test_a_resumed_sweep_goes_on_with_a_point_that_was_begun(finished, root, tmp_path):
    directory, _ = finished
    copy = tmp_path / "s"
    shutil.copytree(directory, copy)
    begun = copy / "stage" / "seed=1"
    checkpoints = begun / "checkpoints"
    whole = json.loads((begun / "run_card.json").read_text())
    shutil.rmtree(begun)
    # Killed after its first step: checkpoints of an unfinished run, and no card.
    config = smoke(root, "activation_checkpointing=stage", "seed=1", "trainer.checkpoint_every_steps=1")
    train({**config, "trainer": {**config["trainer"], "max_steps": 1, "val_every_steps": 1}}, begun, "")
    (checkpoints / "last.ckpt").rename(checkpoints / "step_00000001.ckpt")
    (begun / "run_card.json").unlink()
    plain = sweep(root, copy, "activation_checkpointing=stage", "seed=1", "hydra.sweep.subdir='stage/seed=1'")
    assert "holds checkpoints of an unfinished run" in plain.stderr
    (begun / "run_card.json").unlink()
    result = sweep(root, copy, *POINTS, "sweep.resume=true")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("done before") == 3
    card = json.loads((begun / "run_card.json").read_text())
    assert card["faults"]["resumed_from_step"] == 1
    assert card["metrics"] == whole["metrics"]
    again = sweep(root, copy, *POINTS, "sweep.resume=true")
    assert again.stdout.count("done before") == 4
    assert not json.loads((copy / "report.json").read_text())["notes"]


def test_a_point_that_fails_is_a_row_and_the_sweep_goes_on(root, tmp_path):
    result = sweep(root, tmp_path / "s", "batch.effective=3,2", "batch.per_device=2")
    report = json.loads((tmp_path / "s" / "report.json").read_text())
    assert sorted(run["status"] for run in report["runs"]) == ["completed", "failed"]
    assert result.returncode == 0
    assert "exit status 2; going on" in result.stderr


@pytest.mark.slow
def test_a_sweep_killed_halfway_and_resumed_gives_the_same_report(finished, root, tmp_path):
    directory = tmp_path / "s"
    process = subprocess.Popen(
        command(root, directory, *POINTS),
        cwd=tmp_path,
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    while len(list(directory.rglob("run_card.json"))) < 2:
        time.sleep(0.2)
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert sweep(root, directory, *POINTS, "sweep.resume=true").returncode == 0
    first, again = (json.loads((d / "report.json").read_text()) for d in (finished[0], directory))
    assert stable(first) == stable(again)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [("submitit_local",), ("joblib", "hydra.launcher.n_jobs=1"), ("ray",)])
def test_launchers_that_run_here(root, tmp_path, launcher):
    name, *options = launcher
    pytest.importorskip(f"hydra_plugins.hydra_{name.partition('_')[0]}_launcher")
    result = sweep(root, tmp_path / "s", "seed=0,1", f"hydra/launcher={name}", *options)
    assert result.returncode == 0, result.stderr
    report = json.loads((tmp_path / "s" / "report.json").read_text())
    assert [run["status"] for run in report["runs"]] == ["completed", "completed"]


def test_a_planted_drift_is_reported(root, tmp_path, monkeypatch):
    for mode in ("none", "stage"):
        if mode == "stage":
            # BatchNorm's second update, in the recompute, is let through.
            monkeypatch.setattr(segment_call, "statistics_as_before", lambda *_: nullcontext())
        for seed in (0, 1):
            config = smoke(root, f"activation_checkpointing={mode}", f"seed={seed}", "trainer.max_steps=4")
            config["activation_checkpointing"]["audit"] = "off"
            train(config, tmp_path / mode / f"seed={seed}", "")
    report = make_report(tmp_path)
    assert {row["mode"]: row["parity"] for row in report["modes"]} == {
        "none": "exact",
        "stage": "outside_margin",
    }
