import json

import pytest

from seg4k.errors import UserError
from seg4k.studies.collect import collect_runs
from seg4k.studies.resume import missing_points, point_key, run_overrides, settled_points

POINTS = [
    ["experiment=granularity", f"activation_checkpointing={mode}", f"seed={seed}"]
    for mode in ("none", "stage")
    for seed in (0, 1)
]


def record(directory, overrides):
    (directory / ".hydra").mkdir(exist_ok=True)
    (directory / ".hydra" / "overrides.yaml").write_text(
        "".join(f"- {json.dumps(text)}\n" for text in overrides)
    )


def test_key_is_sorted_and_without_what_is_about_the_sweep():
    assert point_key(
        [
            *("seed=0", "a=1", "hydra.run.dir=x", "+hydra.x=1", "hydra/launcher=joblib"),
            *("sweep.resume=true", "resume=auto", "++resume=auto"),
        ]
    ) == (
        "a=1",
        "seed=0",
    )


def test_the_last_of_a_repeated_key_counts():
    assert point_key(["seed=0", "seed=1"]) == ("seed=1",)
    assert point_key(["seed=1", "seed=0"]) != point_key(["seed=0", "seed=1"])


def test_everything_is_missing_at_first(tmp_path):
    assert missing_points(tmp_path / "sweep", POINTS) == [0, 1, 2, 3]
    (tmp_path / "none" / "seed=0").mkdir(parents=True)
    assert missing_points(tmp_path, POINTS) == [0, 1, 2, 3]


def test_only_completed_cards_count(run, tmp_path):
    record(run("none", 0), reversed(POINTS[0]))
    record(run("none", 1, status="interrupted"), POINTS[1])
    record(run("stage", 0, status="out_of_memory"), POINTS[2])
    assert missing_points(tmp_path, [*POINTS, [*POINTS[0], "trainer.max_steps=5"]]) == [1, 2, 3, 4]
    assert missing_points(tmp_path, POINTS, statuses=("completed", "out_of_memory")) == [1, 3]


def test_resumed_with_another_command(run, tmp_path):
    record(run("none", 0), [*POINTS[0]])
    assert missing_points(tmp_path, [[*POINTS[0], "sweep.resume=true"]]) == []


def test_where_overrides_come_from(run, tmp_path):
    overrides = ["model.encoder.name='vit {x}'", "+data.crop=[256,256]", "seed=0"]
    directory = run("none", 0, command="python train.py 'name=a b' seed=0")

    def found():
        (one,) = collect_runs(tmp_path)
        return run_overrides(one)

    assert found() == ["name=a b", "seed=0"]
    record(directory, overrides)
    assert found() == overrides
    (directory / ".hydra" / "overrides.yaml").write_text("a: [")
    assert found() is None
    card = json.loads((directory / "run_card.json").read_text())
    (directory / "run_card.json").write_text(json.dumps({**card, "overrides": ["seed=0"]}))
    assert found() == ["seed=0"]


@pytest.mark.parametrize("command", ["python train.py -m seed=0,1", "python train.py 'seed=0", None])
def test_a_command_that_tells_nothing(run, tmp_path, command):
    run("none", 0, command=command)
    assert settled_points(tmp_path) == set()


def test_a_point_twice(tmp_path):
    with pytest.raises(UserError, match="twice"):
        missing_points(tmp_path, [["seed=0", "a=1"], ["a=1", "seed=0"]])
