import os
import pty
import re
import subprocess
import sys

import pytest

from tests.helpers import make_folder
from tests.training.runs import ROOT, TINY


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("data"))


def on_a_terminal(command, cwd):
    """What a command writes where its output is a terminal of 160 columns."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "160", "TERM": "xterm"}
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, cwd=cwd, env=environment)
    os.close(theirs)
    output = b""
    while True:
        try:
            chunk = os.read(ours, 65536)
        except OSError:  # Linux says so when the other end is closed
            break
        if not chunk:
            break
        output += chunk
    os.close(ours)
    return process.wait(), output.decode(errors="replace")


def test_the_bar_shows_steps_loss_miou_speed_and_memory(root, tmp_path):
    overrides = ["trainer.max_steps=8", "trainer.val_every_steps=4", f"hydra.run.dir={tmp_path / 'run'}"]
    command = [sys.executable, str(ROOT / "train.py"), *TINY, f"data.root={root}", *overrides]
    status, output = on_a_terminal(command, tmp_path)
    assert status == 0, output
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output)
    last = [line for line in text.splitlines() if line.strip().startswith("Epoch")][-1]
    for figure in (r"step: 8/8", r"train_loss: \d", r"val_miou: \d", r"samples/s: \d", r"peak: \d"):
        assert re.search(figure, text), f"{figure}\n{text}"
    assert "/-" not in last
