"""How processes part. What they tell each other is tested on two of them, in test_two_processes.py."""

import torch.distributed as dist

from seg4k.training.agreement import LETTING_GO_SECONDS, leave_process_group


def test_the_interpreter_is_free_for_a_while_after_the_last_exchange(monkeypatch, tmp_path):
    slept = []
    monkeypatch.setattr("time.sleep", lambda seconds: slept.append((dist.is_initialized(), seconds)))
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    leave_process_group()
    assert slept == [(False, LETTING_GO_SECONDS)]
