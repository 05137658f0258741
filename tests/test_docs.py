"""What docs/ says is true: links lead somewhere, commands compose, code runs, quoted messages exist."""

import re
import shlex
from pathlib import Path

import pytest

import seg4k
from seg4k.cli import VERBS
from tests.helpers import configuration

ROOT = Path(seg4k.__file__).parent.parent
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "benchmarks" / "README.md"])
TEXT = {page: page.read_text() for page in PAGES}
COMMANDS = [
    (page.name, line)
    for page, text in TEXT.items()
    for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    for line in block.splitlines()
    if line.strip()
]
CODE = [
    pytest.param(block, id=f"{page.stem}-{index}")
    for page, text in TEXT.items()
    for index, block in enumerate(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
]


def test_every_page_is_there():
    names = {page.stem for page in PAGES}
    assert names == {"granularity", "modes", "run_card", "memory_4k", "failures", "moving", "README"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", TEXT[page]):
        if not target.startswith("http"):
            assert (page.parent / target.split("#")[0]).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_named_in_the_text_exist(page):
    prose = re.sub(r"```.*?```", "", TEXT[page], flags=re.DOTALL)
    for name in re.findall(r"`((?:docs|tests|benchmarks|conf|seg4k)/[\w./-]+)`", prose):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_commands_compose(page, command):
    words = shlex.split(command)
    if words[0] == "seg4k":
        assert words[1] in VERBS
        configuration(*words[2:])
    elif words[:2] == ["python", "train.py"]:
        configuration(*words[2:])
    elif words[:2] == ["python", "-m"]:
        assert (ROOT / (words[2].replace(".", "/") + ".py")).is_file()
    else:
        assert words[0] == "python"
        script = ROOT / words[1]
        assert script.is_file()
        options = [word for word in words[2:] if word.startswith("--")]
        assert all(f'"{option}"' in script.read_text() for option in options)


@pytest.mark.parametrize("code", CODE)
def test_code_runs(code):
    exec(compile(code, "docs", "exec"), {"__name__": "docs"})


def test_what_the_page_says_is_printed(capsys):
    text = TEXT[ROOT / "docs" / "moving.md"]
    block = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[-1]
    exec(compile(block, "docs", "exec"), {"__name__": "docs"})
    (expected,) = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    assert capsys.readouterr().out == expected


def test_quoted_messages_exist():
    source = "\n".join(path.read_text() for path in (ROOT / "seg4k").rglob("*.py"))
    source = re.sub(r'"\s*\n\s*f?"', "", source)  # strings that go on in the next line
    for line in TEXT[ROOT / "docs" / "failures.md"].splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if line.startswith("| `"):
            for quoted in re.findall(r"`([^`]+)`", cells[1]):
                assert quoted in source, quoted


def test_fields_of_the_run_card_exist():
    source = (ROOT / "seg4k" / "training" / "train.py").read_text() + "".join(
        path.read_text() for path in (ROOT / "seg4k" / "training").glob("*.py")
    )
    for line in TEXT[ROOT / "docs" / "run_card.md"].splitlines():
        if line.startswith("| `"):
            for name in re.findall(r"`([\w.]+)`", line.split("|")[1]):
                assert f'"{name.split(".")[-1]}"' in source, name
