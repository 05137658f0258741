import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import seg4k
from tests.helpers import configuration

ROOT = Path(seg4k.__file__).parent.parent
README = (ROOT / "README.md").read_text()
COMMANDS = [
    command.strip()
    for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
    for command in line.split("&&")
    if command.strip()
]
TRAIN = [command for command in COMMANDS if command.startswith("python train.py")]


def first_choice(word):
    """A sweep's `key=a,b` as its first point `key=a`."""
    return word if "[" in word else re.sub(r"=([^,]+),.*", r"=\1", word)


def test_readme_gives_the_commands_that_others_rely_on():
    assert "pip install -e '.[demo]' && python train.py experiment=quickstart" in README
    assert "pip install -e '.[dev]' && pytest" in README
    assert "pip install -e '.[dev]'" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("command", TRAIN)
def test_every_command_composes(command):
    words = [first_choice(word) for word in shlex.split(command)[2:] if not word.startswith(("-", "hydra"))]
    assert configuration(*words)["name"] in command


def test_the_demonstration_shows_the_error():
    (command,) = [command for command in COMMANDS if command.startswith("python -m")]
    result = subprocess.run(
        [sys.executable, *shlex.split(command)[1:]], capture_output=True, text=True, timeout=120, check=False
    )
    assert "in place" in (result.stdout + result.stderr).lower().replace("-", " ")


def test_the_first_command_trains(tmp_path):
    # The command itself, made small: what it takes at full size is measured, not tested.
    overrides = ["trainer.max_steps=1", "model.encoder.name=test_vit", "data.val_size=[900,780]"]
    command = [sys.executable, str(ROOT / "train.py"), *shlex.split(TRAIN[0])[2:], *overrides]
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
    assert len(list((tmp_path / "outputs" / "quickstart").glob("*/val_samples.png"))) == 1


def test_files_that_readme_shows_are_there():
    for path in re.findall(r"!\[.*?\]\((.*?)\)", README):
        assert (ROOT / path).is_file(), path
