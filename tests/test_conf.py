import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from seg4k.cli import conf_directory
from tests.helpers import configuration

CONF = conf_directory()
EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
# The factors of a loss, explained by the comment of their mapping; Hydra's own keys; a mode, by its file.
UNDOCUMENTED = {"ce", "dice", "focal", "jaccard", "tversky", "dir", "subdir", "chdir", "mode"}
HEADER = ("command", "hardware", "time", "memory", "mIoU")


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_composes_and_says_what_to_expect(name):
    assert configuration(f"experiment={name}")["name"] == name
    comments = [
        line for line in (CONF / "experiment" / f"{name}.yaml").read_text().splitlines() if line[:1] == "#"
    ]
    for entry in HEADER:
        assert any(line.startswith(f"#   {entry}") for line in comments), entry
    assert any(f"experiment={name}" in line for line in comments)


@pytest.mark.parametrize("path", sorted(CONF.rglob("*.yaml")), ids=lambda path: str(path.relative_to(CONF)))
def test_every_key_is_documented_where_it_stands(path):
    if path.parent.name in ("experiment", "device"):
        return  # an experiment repeats documented keys; a device's are documented by its head
    comment = False
    for line in path.read_text().splitlines():
        key, _, value = line.strip().partition(":")
        if line.startswith("#") or not line.strip() or line.lstrip().startswith("- "):
            comment = line.startswith("#")
        elif value.strip() and key != "name" and key not in UNDOCUMENTED:
            assert "#" in value or comment, f"{path}: {line}"


def test_an_experiment_states_only_what_differs():
    defaults = configuration()
    for name in EXPERIMENTS:
        content = yaml.safe_load((CONF / "experiment" / f"{name}.yaml").read_text())
        chosen = {entry.partition("/")[2] for item in content.pop("defaults", []) for entry in item}

        def same(value, default, where):
            if isinstance(value, dict):
                return [key for k, v in value.items() for key in same(v, default.get(k), f"{where}.{k}")]
            return [where] if value == default else []

        for key, value in content.items():
            if key not in chosen:
                assert not same(value, defaults.get(key), key), f"{name} repeats a default"


def test_tests_see_the_configuration_of_the_clone():
    assert Path(CONF).name == "conf"
    assert (CONF.parent / "train.py").is_file()


def test_an_installed_wheel_brings_its_configuration(tmp_path):
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=CONF.parent, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("seg4k-*.whl")
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    assert {path.name for path in site.iterdir()} == {
        "seg4k",
        f"{wheel.name.removesuffix('-py3-none-any.whl')}.dist-info",
    }
    code = """
import seg4k.cli
print(seg4k.cli.conf_directory())
raise SystemExit(seg4k.cli.main(["train", "--cfg", "job", "experiment=smoke"]))
"""
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    first, _, rest = result.stdout.partition("\n")
    assert first == str(site / "seg4k" / "conf")
    assert yaml.safe_load(rest)["name"] == "smoke"
