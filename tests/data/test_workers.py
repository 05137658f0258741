import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

# A process whose threads hold locks when the workers start; each crop comes from a worker.
TRAINED = """
import sys, threading
import torch
from seg4k.data.build import build_datamodule

def main(root, wait):
    torch.set_num_threads(4)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 32, 3), torch.nn.ReLU(), torch.nn.Conv2d(32, 3, 3))
    model(torch.rand(2, 3, 256, 256)).sum().backward()
    config = {"name": "folder", "root": root, "image_size": [16, 16], "num_workers": 2,
              "augment": {"hflip": 0.5}, "samples_per_epoch": 1000 if wait else 8}
    data = build_datamodule(config, seed=0, batch_size=2)
    for batch in data.train_dataloader():
        model(batch["image"].float()).sum().backward()
        if wait:
            import multiprocessing
            print(*[child.pid for child in multiprocessing.active_children()], flush=True)
            threading.Event().wait()
    print(len(list(data.val_dataloader())))

if __name__ == "__main__":
    main(sys.argv[1], len(sys.argv) > 2)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(TRAINED)
    return path


def environment():
    root = str(Path(__file__).parents[2])
    return {**os.environ, "PYTHONPATH": root}


def test_workers_start_after_training_in_the_same_process(script, make_folder):
    command = [sys.executable, str(script), str(make_folder())]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "2"  # batches of 3 images


def test_workers_end_with_a_killed_process(script, make_folder):
    command = [sys.executable, str(script), str(make_folder()), "wait"]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    workers = [int(word) for word in process.stdout.readline().split()]
    assert len(workers) == 2
    process.send_signal(signal.SIGKILL)
    process.communicate()
    until = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < until, "workers are left over"
        time.sleep(0.1)
