import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import seg4k
from seg4k.cli import _command, main, run_with_config
from seg4k.training.ranges import check_ranges
from tests.helpers import make_folder

ROOT = Path(seg4k.__file__).parent.parent
FAST = ["experiment=smoke", "data=folder", "data.image_size=[32,48]", "data.val_size=null"]


def run(*arguments, cwd, program=("train.py",)):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        *(str(ROOT / part) if part.endswith(".py") else part for part in program),
        *arguments,
    ]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("data"))


def mistake(capsys, arguments):
    status = main(arguments)
    captured = capsys.readouterr()
    assert status == 2, captured.err
    assert "Traceback" not in captured.err
    assert captured.err.startswith("seg4k")
    return captured.err


def test_importing_costs_nothing():
    # The median of several, since a busy machine may stall one.
    code = "import time; t = time.perf_counter(); import seg4k, seg4k.cli; print(time.perf_counter() - t)"
    times = sorted(float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(3))
    assert times[1] < 0.5


def test_importing_leaves_heavy_libraries_alone():
    heavy = {"torch", "lightning", "timm", "hydra", "numpy"}
    code = f"import sys, seg4k, seg4k.cli; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_help_answers_at_once(tmp_path):
    started = time.perf_counter()
    result = run("--help", cwd=tmp_path)
    assert time.perf_counter() - started < 5
    assert result.returncode == 0
    assert "experiment: quickstart, smoke, vitb_4k" in result.stdout.replace("granularity, ", "").replace(
        "speed, ", ""
    )
    assert main(["--help"]) == 0


def test_a_run_from_the_command_line(root, tmp_path):
    result = run(*FAST, f"data.root={root}", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    (card,) = (tmp_path / "outputs" / "smoke").glob("*/run_card.json")
    content = json.loads(card.read_text())
    assert content["status"] == "completed"
    assert content["command"].startswith("python train.py experiment=smoke")
    # The table per class at the end.
    assert "left" in result.stdout
    assert "mIoU" in result.stdout
    # Everything lies in the run directory.
    assert {path.name for path in tmp_path.iterdir()} == {"outputs"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["modle.encoder.name=x"], "modle.encoder.name: no such key. Did you mean model.encoder.name"),
        (["batch.efective=4"], "Did you mean batch.effective"),
        (["+batch.extra=4"], "batch.extra: no such key"),
        (
            ["experiment=quickstrat"],
            "experiment=quickstrat: no such choice. Did you mean quickstart? There are gran",
        ),
        (
            ["activation_checkpointing=stages"],
            "no such choice. Did you mean stage? There are auto, block, decoder, ",
        ),
        (["data=zzz"], "data=zzz: no such choice. There are ade20k, blue_marble, checkpoint"),
        (["data=folder", "data.root=/nowhere/at/all"], "/nowhere/at/all"),
        (["data=folder"], "data.root"),
        (["trainer.max_steps=many"], "trainer.max_steps"),
        (["batch.per_device=3", "batch.effective=4"], "batch.effective=3"),
        (["model.encoder.name=vit_tinny_patch16_224"], "vit_tiny_patch16_224"),
        (["model.encoder.weights=/no/file.pth"], "/no/file.pth"),
        (["activation_checkpointing=plan"], "activation_checkpointing.path"),
        (["data.image_size=512"], "data.image_size=512: give a list of two numbers"),
        (["data.image_size=[64]"], "data.image_size=[64]: give a list of two numbers"),
        (["data.image_size=[0,64]"], "data.image_size"),
        (["optimizer.betas=0.9"], "give a list of two numbers, such as optimizer.betas=[0.9,0.999]"),
        (["model.decoder.channels=16"], "model.decoder.channels=16: give a list"),
        (["trainer.val_every_steps=1.5"], "trainer.val_every_steps=1.5: give a whole number"),
        (["batch.per_device=1.5"], "batch.per_device=1.5: give a whole number"),
        (["seed=1.5"], "seed=1.5: give a whole number"),
        (["seed=-1"], "seed=-1: give a whole number from 0 to 4294967295"),
        (["trainer.ema_decay=2"], "trainer.ema_decay=2: give a number from 0 to below 1"),
        (["model.encoder.weights=null"], "model.encoder.weights=None: give pretrained, random, or a weights"),
    ],
)
def test_mistakes_end_with_one_message(capsys, tmp_path, monkeypatch, root, arguments, expected):
    monkeypatch.chdir(tmp_path)
    known = [] if any("experiment" in a or "data" in a for a in arguments) else [*FAST, f"data.root={root}"]
    assert expected in mistake(capsys, ["train", *known, *arguments])


def composed(*overrides):
    """What a verb is handed."""
    found = []
    run_with_config(lambda config, _: found.append(config), overrides)
    return found[0]


def test_a_whole_number_may_be_spelled_as_1e4(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = composed("trainer.max_steps=1e4", "trainer.val_every_steps=5e2", "optimizer.weight_decay=1")
    assert repr(config["trainer"]["max_steps"]) == "10000"
    assert repr(config["trainer"]["val_every_steps"]) == "500"
    assert config["optimizer"]["weight_decay"] == 1


@pytest.mark.parametrize(
    "override",
    [
        "seed=0",
        "data.val_size=null",
        "data.rare_classes=null",
        "data.augment=null",
        "data.num_workers=0",
        "loss.strips=4",
        "loss.strips=auto",
        "model.encoder.frozen=2",
        "activation_checkpointing.budget=1e9",
        "activation_checkpointing.budget=24GiB",
        "data.samples_per_epoch=null",
        "speed.modes=[none,stage]",
    ],
)
def test_what_the_comments_of_conf_allow_is_taken(tmp_path, monkeypatch, override):
    monkeypatch.chdir(tmp_path)
    check_ranges(composed(override))


def test_an_experiment_file_with_a_wrong_key_is_refused(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    (tmp_path / "conf" / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ntrainer:\n  max_step: 5\n"
    )
    monkeypatch.setattr("seg4k.cli.conf_directory", lambda: tmp_path / "conf")
    assert "trainer.max_step: no such key" in mistake(capsys, ["train", "experiment=mine"])


@given(st.lists(st.text(alphabet="a='\"$`\\! \n[]", min_size=1), min_size=1))
def test_the_command_on_the_card_means_the_same_to_a_shell(words):
    assert shlex.split(_command("train", words)) == ["seg4k", "train", *words]
    assert _command("train", ["hydra.run.dir='a/seed=0'"]) == """seg4k train "hydra.run.dir='a/seed=0'\""""


@pytest.mark.parametrize("arguments", [[], ["trian"], ["nonsense"]])
def test_unknown_verbs(capsys, arguments):
    message = mistake(capsys, arguments)
    assert "seg4k VERB" in message
    assert "Did you mean train" in message or arguments != ["trian"]


def test_a_fault_of_ours_keeps_its_traceback(root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("seg4k.training.assembly.build_model", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["train", *FAST, f"data.root={root}"])


def test_a_killed_run_leaves_no_card_or_a_whole_one(root, tmp_path):
    command = [sys.executable, str(ROOT / "train.py"), *FAST, f"data.root={root}", "trainer.max_steps=100000"]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 3"):
            break
    process.kill()
    process.communicate()
    cards = list((tmp_path / "outputs").rglob("run_card.json"))
    assert all(json.loads(card.read_text())["schema"] == 1 for card in cards)
