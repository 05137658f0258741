import json

import pytest

from seg4k.errors import UserError
from seg4k.studies.collect import MODES, collect_runs


def test_finds_runs_at_any_depth_in_order(run, tmp_path):
    run("stage", 1)
    run("none", 10, at="deep/er/none/seed=10")
    run("none", 2)
    run("selective", 0, at="7")
    runs = collect_runs(tmp_path)
    assert [(one.mode, one.seed, one.name) for one in runs] == [
        ("none", 2, "none/seed=2"),
        ("none", 10, "deep/er/none/seed=10"),
        ("stage", 1, "stage/seed=1"),
        ("selective", 0, "7"),
    ]
    assert all(one.completed for one in runs)


def test_the_directory_itself_may_be_a_run(run):
    directory = run()
    assert [one.name for one in collect_runs(directory)] == ["."]


@pytest.mark.parametrize("status", ["completed", "out_of_memory", "failed", "interrupted"])
def test_statuses(run, tmp_path, status):
    run(status=status, error="why")
    (one,) = collect_runs(tmp_path)
    assert (one.status, one.error, one.completed) == (status, "why", status == "completed")


def test_run_without_card_is_a_failed_row(run, tmp_path):
    run("none", 0)
    half = tmp_path / "block" / "seed=3"
    (half / "csv").mkdir(parents=True)
    (half / "csv" / "metrics.csv").write_text("step\n")
    empty = tmp_path / "layer" / "seed=-1"
    empty.mkdir(parents=True)
    recorded = tmp_path / "4"
    (recorded / ".hydra").mkdir(parents=True)
    (recorded / ".hydra" / "overrides.yaml").write_text(
        "- experiment=granularity\n- activation_checkpointing=selective\n- seed=5\n- 'x=[1,2]'\n"
    )
    assert [(one.mode, one.seed, one.status) for one in collect_runs(tmp_path)] == [
        ("none", 0, "completed"),
        ("block", 3, "failed"),
        ("layer", -1, "failed"),
        ("selective", 5, "failed"),
    ]


def test_what_hydra_keeps_for_a_sweep_is_no_run(run, tmp_path):
    run("none", 0)
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".submitit" / "12").mkdir(parents=True)
    (tmp_path / ".submitit" / "12" / "metrics.csv").write_text("")
    (tmp_path / "multirun.yaml").write_text("")
    (tmp_path / "none" / "seed=0" / ".hydra").mkdir()
    assert [one.name for one in collect_runs(tmp_path)] == ["none/seed=0"]


@pytest.mark.parametrize("text", ["", '{"schema": 1, "status"', "\x00\x00"])
def test_damaged_card_is_a_failed_row(run, tmp_path, text):
    run("none", 0)
    (run("stage", 1) / "run_card.json").write_text(text)
    one = collect_runs(tmp_path)[1]
    assert (one.mode, one.seed, one.status) == ("stage", 1, "failed")
    assert "damaged" in one.error


@pytest.mark.parametrize("card", [{"schema": 2}, {"schema": True}, {}, [], 3])
def test_unknown_schema(run, tmp_path, card):
    (run() / "run_card.json").write_text(json.dumps(card))
    with pytest.raises(UserError, match=r"run_card\.json has schema"):
        collect_runs(tmp_path)


def test_unknown_status(run, tmp_path):
    run(status="exploded")
    with pytest.raises(UserError, match="exploded"):
        collect_runs(tmp_path)


def test_nothing_there(tmp_path):
    with pytest.raises(UserError, match=r"no run_card\.json"):
        collect_runs(tmp_path)
    (tmp_path / "none" / "seed=0").mkdir(parents=True)
    with pytest.raises(UserError, match="1 run directories without a card"):
        collect_runs(tmp_path)
    with pytest.raises(UserError, match="not a directory"):
        collect_runs(tmp_path / "missing")


def test_blank_values_are_none(run, tmp_path):
    run(
        status="failed",
        memory={"peak_bytes": None},
        throughput=None,
        metrics=None,
        device={"count": 0, "name": "not reached"},
        strategy="not reached",
    )
    (one,) = collect_runs(tmp_path)
    assert (one.peak_bytes, one.samples_per_second, one.metrics) == (None, None, {})
    assert (one.devices, one.strategy, one.device_name) == (1, "", "")


def test_modes_are_those_of_the_design():
    assert MODES == ("none", "stage", "block", "layer", "encoder", "decoder", "selective", "auto", "plan")
