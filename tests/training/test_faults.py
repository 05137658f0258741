import errno
import os
import random
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from seg4k.cli import main
from seg4k.data.sampling import epoch_order, scene_order
from seg4k.errors import UserError
from seg4k.models.vit_unet import build_model
from seg4k.training.callbacks import MemoryWatch, Stopwatch
from seg4k.training.metrics_csv import MetricsCsv
from seg4k.training.resume import find_checkpoint
from seg4k.training.train import train
from seg4k.training.weights import read_checkpoint
from tests.helpers import make_folder, smoke
from tests.training.runs import TINY, TWO, card, children, first_step, run, start, weights_hash

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def unbroken(root, tmp_path_factory):
    """A run that was never killed."""
    directory = tmp_path_factory.mktemp("unbroken") / "run"
    run(root, directory)
    return directory


def kill_at_random(root, directory, moment, *overrides, after_checkpoint=False):
    """Start, kill `moment` seconds after the first step, and say how far its checkpoints had come."""
    process = start(root, directory, "resume=auto", *overrides)
    first_step(process)
    while after_checkpoint and not list((directory / "checkpoints").glob("step_*.ckpt")):
        assert process.poll() is None
        time.sleep(0.02)
    time.sleep(moment)
    process.kill()
    process.communicate()
    return sorted(path.stem for path in (directory / "checkpoints").glob("*.ckpt"))


def check_killed(root, directory, unbroken, moments, *overrides, **options):
    found = [(moment, kill_at_random(root, directory, moment, *overrides, **options)) for moment in moments]
    run(root, directory, "resume=auto", *overrides)
    resumed = card(directory)["faults"]["resumed_from_step"]
    print(f"killed {found}, resumed from {resumed}, weights {weights_hash(directory)[:16]}")
    assert weights_hash(directory) == weights_hash(unbroken)
    assert (directory / "metrics.csv").read_text() == (unbroken / "metrics.csv").read_text()
    assert card(directory)["metrics"] == card(unbroken)["metrics"]
    assert sorted(path.name for path in (directory / "checkpoints").iterdir()) == ["best.ckpt", "last.ckpt"]


def test_killed_at_a_random_moment_a_run_ends_with_the_same_bits(root, unbroken, tmp_path):
    check_killed(root, tmp_path / "run", unbroken, [random.Random(0).uniform(0.0, 0.4)])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 11))
def test_killed_twice_at_twenty_random_moments(root, unbroken, tmp_path, seed):
    draw = random.Random(seed)
    check_killed(root, tmp_path / "run", unbroken, [draw.uniform(0.0, 0.8) for _ in range(2)])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_killed_with_two_processes(root, tmp_path, strategy):
    overrides = (f"strategy={strategy}", *TWO)
    run(root, tmp_path / "unbroken", *overrides)
    check_killed(root, tmp_path / "run", tmp_path / "unbroken", [0.1, 0.4], *overrides, after_checkpoint=True)


def test_told_to_end_it_saves_says_143_and_goes_on_exactly(root, unbroken, tmp_path):
    process = start(root, tmp_path / "run", "resume=auto")
    first_step(process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143, output
    assert card(tmp_path / "run")["status"] == "interrupted"
    assert "SIGTERM after optimizer step" in card(tmp_path / "run")["error"]
    run(root, tmp_path / "run", "resume=auto")
    assert weights_hash(tmp_path / "run") == weights_hash(unbroken)
    assert (tmp_path / "run" / "metrics.csv").read_text() == (unbroken / "metrics.csv").read_text()
    assert "nothing to do" in run(root, tmp_path / "run", "resume=auto")


def test_ctrl_c_ends_it_with_130_and_it_goes_on_exactly(root, unbroken, tmp_path):
    process = start(root, tmp_path / "run", "resume=auto")
    first_step(process)
    while not list((tmp_path / "run" / "checkpoints").glob("step_*.ckpt")):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert output.endswith("seg4k: interrupted\n")
    assert "Traceback" not in output
    assert card(tmp_path / "run")["status"] == "interrupted"
    assert card(tmp_path / "run")["error"] == "KeyboardInterrupt"
    assert list((tmp_path / "run" / "checkpoints").glob("step_*.ckpt"))
    run(root, tmp_path / "run", "resume=auto")
    assert weights_hash(tmp_path / "run") == weights_hash(unbroken)


@linux
@pytest.mark.slow
def test_ctrl_c_comes_to_every_process(root, tmp_path):
    process = start(root, tmp_path / "run", "strategy=ddp", *TWO, "trainer.max_steps=10000")
    first_step(process)
    for number in (*children(process), process.pid):
        os.kill(number, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "seg4k: interrupted" in output
    assert "Traceback" not in output
    assert card(tmp_path / "run")["status"] == "interrupted"


@linux
@pytest.mark.slow
def test_any_process_may_be_told_to_end(root, tmp_path):
    process = start(root, tmp_path / "run", "strategy=ddp", *TWO)
    first_step(process)
    os.kill(children(process)[0], signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143, output
    assert card(tmp_path / "run")["status"] == "interrupted"
    assert list((tmp_path / "run" / "checkpoints").glob("step_*.ckpt"))


@linux
def test_a_process_that_dies_ends_the_others_and_is_named(root, tmp_path):
    process = start(root, tmp_path / "run", "strategy=ddp", *TWO)
    first_step(process)
    began = time.monotonic()
    os.kill(children(process)[0], signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    assert process.returncode not in (0, 2, 143), output
    assert time.monotonic() - began < 60
    assert card(tmp_path / "run")["status"] == "failed"
    assert "process 1 ended with status -9" in card(tmp_path / "run")["error"]


@pytest.mark.slow
def test_the_error_of_another_process_is_shown(tmp_path):
    root = make_folder(tmp_path / "data", train=4)
    samples = 8

    def scenes(seed):
        order = epoch_order(seed, 0, samples)
        return [scene_order(seed, 0, index // 4, 4)[index % 4] for index in order]

    # One that the second process reads first, and the first one neither in its first two nor before training.
    seed = next(seed for seed in range(100) if scenes(seed)[1] not in (0, *scenes(seed)[0:4:2]))
    number = scenes(seed)[1]
    broken = sorted((root / "images" / "train").iterdir())[number]
    broken.write_bytes(broken.read_bytes()[:-100])
    began = time.monotonic()
    process = start(
        root, tmp_path / "run", "strategy=ddp", *TWO, f"seed={seed}", f"data.samples_per_epoch={samples}"
    )
    output, _ = process.communicate(timeout=120)
    assert process.returncode not in (0, 143), output
    assert f"process 1: error: {broken} cannot be decoded" in output
    error = card(tmp_path / "run")["error"]
    assert "process 1 ended with status 2" in error
    assert time.monotonic() - began < 90  # of which half a minute is starting


def test_a_damaged_image_may_be_left_out(tmp_path):
    root = make_folder(tmp_path / "data", train=4)
    broken = sorted((root / "images" / "train").iterdir())[1]
    broken.write_bytes(broken.read_bytes()[:-100])
    with pytest.raises(UserError, match=broken.name):
        train(smoke(root, "trainer.max_steps=4"), tmp_path / "stop", "")
    result = train(smoke(root, "trainer.max_steps=4", "data.on_error=skip"), tmp_path / "skip", "")
    assert result["status"] == "completed"


@linux
@pytest.mark.slow
def test_no_process_outlives_the_first(root, tmp_path):
    process = start(root, tmp_path / "run", "strategy=ddp", *TWO)
    first_step(process)
    other = children(process)[0]
    process.kill()
    process.communicate()
    for _ in range(100):
        if not Path(f"/proc/{other}").exists():
            return
        time.sleep(0.1)
    raise AssertionError("the second process is still there")


def test_a_full_disk_is_told_and_leaves_the_last_checkpoint(root, tmp_path):
    process = start(root, tmp_path / "run", "trainer.max_steps=400", "trainer.checkpoint_every_steps=3")
    first_step(process)
    while not list((tmp_path / "run" / "checkpoints").glob("step_*.ckpt")):
        assert process.poll() is None
        time.sleep(0.02)
    process.kill()
    process.communicate()
    kept = sorted((tmp_path / "run" / "checkpoints").iterdir())
    size = kept[0].stat().st_size
    output = run(root, tmp_path / "run", "resume=auto", file_size=size // 2, status=2)
    assert "no space left" in output
    assert "resume=auto" in output
    assert "Traceback" not in output
    assert set(kept) <= set((tmp_path / "run" / "checkpoints").iterdir())
    assert not [path for path in (tmp_path / "run" / "checkpoints").iterdir() if path.name.startswith(".")]
    assert card(tmp_path / "run")["status"] == "failed"
    assert find_checkpoint({**smoke(root), "resume": "auto"}, tmp_path / "run")


def stop_at(monkeypatch, at, kind=RuntimeError):
    """Make training fail once `at` optimizer steps are done."""
    from seg4k.training.module import SegmentationModule

    step = SegmentationModule.training_step

    def fail(self, batch, index):
        if self.trainer.global_step == at:
            raise kind("a fault")
        return step(self, batch, index)

    monkeypatch.setattr(SegmentationModule, "training_step", fail)


@pytest.fixture
def stopped(root, tmp_path, monkeypatch):
    """A run that failed after step 5, with checkpoints of steps 2 and 4."""
    config = smoke(
        root, "trainer.max_steps=8", "trainer.checkpoint_every_steps=2", "trainer.val_every_steps=8"
    )
    with monkeypatch.context() as patch:
        stop_at(patch, 5)
        with pytest.raises(RuntimeError, match="a fault"):
            train(config, tmp_path / "run", "")
    return {**config, "resume": "auto"}, tmp_path / "run"


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("writer", ["metrics_csv.MetricsCsv", "loggers.TensorBoardLogger"])
def test_a_disk_that_is_full_for_everything_is_told_once(root, tmp_path, monkeypatch, capsys, writer):
    directory, logger = tmp_path / "run", f"seg4k.training.{writer}.log_metrics"

    def some_room(self, metrics, step=None):
        if step == 3:
            monkeypatch.setattr("seg4k.training.run_card.write_text", full)
            full()

    monkeypatch.setattr(logger, some_room)
    overrides = [f"data.root={root}", f"hydra.run.dir={directory}", "trainer.checkpoint_every_steps=1"]
    assert main(["train", *TINY, *overrides, "logger.tensorboard=true", "trainer.log_every_steps=1"]) == 2
    said = capsys.readouterr().err
    assert said.count("error: ") == 1
    assert f"no space left on the disk of {directory}" in said
    assert "resume=auto" in said
    assert "the run card" in said
    assert not (directory / "run_card.json").exists()
    torch.load(directory / "checkpoints" / "step_00000002.ckpt", weights_only=True)


def test_a_thread_that_writes_to_a_full_disk_prints_no_traceback(root, tmp_path, monkeypatch, capsys):
    def write(self, data):
        full()

    printed = []
    monkeypatch.setattr(threading, "excepthook", printed.append)
    monkeypatch.setattr("tensorboard.summary.writer.record_writer.RecordWriter.write", write)
    overrides = [f"data.root={root}", f"hydra.run.dir={tmp_path / 'run'}", "logger.tensorboard=true"]
    assert main(["train", *TINY, *overrides]) == 2
    assert not printed
    assert f"no space left on the disk of {tmp_path / 'run'}" in capsys.readouterr().err


def test_a_run_whose_card_finds_no_space_is_not_taken_for_complete(root, tmp_path, monkeypatch):
    monkeypatch.setattr("seg4k.training.run_card.write_text", full)
    with pytest.raises(UserError, match="no space left on the disk of"):
        train(smoke(root), tmp_path, "")


def test_another_process_is_lost_on_a_full_disk(root, tmp_path, monkeypatch):
    monkeypatch.setattr("seg4k.training.run_card.write_text", full)
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)

    def prepare(config, directory, card, job, interruption, found):
        job.on_lost("process 1 ended")
        raise UserError("enough")

    monkeypatch.setattr("seg4k.training.train.prepare", prepare)
    with pytest.raises(UserError, match="enough"):
        train(smoke(root), tmp_path, "")
    assert ended == [1]


@pytest.mark.parametrize("damage", [flip_a_bit, truncate, lambda path: path.write_bytes(b"")])
def test_a_damaged_checkpoint_is_passed_over(stopped, damage, caplog):
    config, directory = stopped
    damage(directory / "checkpoints" / "step_00000004.ckpt")
    result = train(config, directory, "")
    assert result["status"] == "completed"
    assert result["faults"]["resumed_from_step"] == 2
    assert "step_00000004.ckpt is damaged and passed over" in caplog.text


def test_when_all_are_damaged_nothing_is_begun_anew_unasked(stopped):
    config, directory = stopped
    for path in (directory / "checkpoints").glob("step_*.ckpt"):
        truncate(path)
    with pytest.raises(UserError, match="every checkpoint"):
        train(config, directory, "")


def test_nor_where_the_damaged_one_is_that_of_a_complete_run(root, tmp_path):
    config = smoke(root)
    train(config, tmp_path, "")
    truncate(tmp_path / "checkpoints" / "last.ckpt")
    with pytest.raises(UserError, match="every checkpoint"):
        train({**config, "resume": "auto"}, tmp_path, "")


def names(directory):
    return sorted(path.name for path in (directory / "checkpoints").iterdir())


def test_a_run_that_was_given_more_steps_goes_on_from_its_newest(root, tmp_path, monkeypatch):
    rhythm = ("trainer.checkpoint_every_steps=2", "trainer.val_every_steps=20")
    train(smoke(root, *rhythm, "trainer.max_steps=3"), tmp_path, "")
    longer = {**smoke(root, *rhythm, "trainer.max_steps=12"), "resume": "auto"}
    with monkeypatch.context() as patch:
        stop_at(patch, 7)
        with pytest.raises(RuntimeError, match="a fault"):
            train(longer, tmp_path, "")
    assert names(tmp_path) == ["best.ckpt", "last.ckpt", "step_00000004.ckpt", "step_00000006.ckpt"]
    assert find_checkpoint(longer, tmp_path)[0].name == "step_00000006.ckpt"
    flip_a_bit(tmp_path / "checkpoints" / "step_00000006.ckpt")
    truncate(tmp_path / "checkpoints" / "step_00000004.ckpt")
    assert find_checkpoint(longer, tmp_path)[0].name == "last.ckpt"


def test_later_checkpoints_do_not_displace_those_of_a_run_that_went_back(stopped, monkeypatch):
    config, directory = stopped
    source = directory / "second.ckpt"
    shutil.copy(directory / "checkpoints" / "step_00000002.ckpt", source)
    often = {**config["trainer"], "checkpoint_every_steps": 1}

    def go_back():
        with monkeypatch.context() as patch:
            stop_at(patch, 3)
            with pytest.raises(RuntimeError, match="a fault"):
                train({**config, "resume": str(source), "trainer": often}, directory, "")
        assert find_checkpoint(config, directory)[0].name == "step_00000003.ckpt"

    go_back()
    assert names(directory) == ["left_step_00000004.ckpt", "step_00000002.ckpt", "step_00000003.ckpt"]
    train(config, directory, "")
    assert names(directory) == ["best.ckpt", "last.ckpt"]
    go_back()  # the end of the complete run is no longer where to go on
    assert names(directory) == ["best.ckpt", "left_last.ckpt", "step_00000003.ckpt"]


def test_an_unfinished_run_is_not_overwritten(stopped):
    config, directory = stopped
    with pytest.raises(UserError, match="resume=auto, or remove them"):
        train({**config, "resume": "none"}, directory, "")


def test_going_on_with_other_settings_is_said(stopped, caplog):
    config, directory = stopped
    train({**config, "optimizer": {**config["optimizer"], "lr": 0.5}}, directory, "")
    assert "other values of optimizer.lr" in caplog.text


@pytest.fixture(scope="module", params=["adamw", "sgd", "adamw_8bit"])
def complete(request, root, tmp_path_factory):
    """A run of three steps, and the overrides that made it."""
    if request.param == "adamw_8bit":
        pytest.importorskip("torchao")
    overrides = (f"optimizer={request.param}", "optimizer.layer_decay=0.5", "trainer.ema_decay=0.0")
    directory = tmp_path_factory.mktemp("complete")
    train(smoke(root, *overrides, "trainer.max_steps=3"), directory, "")
    return directory / "checkpoints" / "last.ckpt", overrides


def gone_on(root, source, directory, *overrides):
    config = smoke(root, "trainer.max_steps=6", "schedule.final_ratio=1.0", *overrides)
    train({**config, "resume": str(source)}, directory, "")
    return read_checkpoint(directory / "checkpoints" / "last.ckpt")


def test_other_settings_of_the_optimizer_take_effect(root, complete, tmp_path):
    source, overrides = complete
    before = read_checkpoint(source)
    rates = {
        group["name"]: float(group["initial_lr"]) for group in before["optimizer_states"][0]["param_groups"]
    }
    top = max(rates.values())
    after = gone_on(root, source, tmp_path, *overrides, "optimizer.lr=1e-12", "optimizer.weight_decay=0.9")
    for group in after["optimizer_states"][0]["param_groups"]:
        rate = 1e-12 * rates[group["name"]] / top  # each depth has its own
        assert float(group["lr"]) == pytest.approx(rate, rel=1e-5, abs=0.0)
        assert group["weight_decay"] == (0.0 if group["name"].endswith("_undecayed") else 0.9)
    weights = [name for name in before["state_dict"] if name.endswith(("weight", "bias"))]
    moved = [(after["state_dict"][name] - before["state_dict"][name]).abs().max() for name in weights]
    assert max(moved) < 1e-9


def test_so_do_betas_and_momentum(root, complete, tmp_path):
    source, overrides = complete
    change, key = (
        ("optimizer.momentum=0.0", "momentum")
        if "optimizer=sgd" in overrides
        else ("optimizer.betas=[0.5,0.6]", "betas")
    )
    groups = gone_on(root, source, tmp_path, *overrides, change)["optimizer_states"][0]["param_groups"]
    assert all(group[key] in (0.0, (0.5, 0.6)) for group in groups)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer=sgd", "optimizer.name=adamw.*optimizer.name=sgd"),
        ("optimizer=adamw_8bit", "optimizer.name=adamw.*optimizer.name=adamw_8bit"),
        ("model.encoder.name=vit_tiny_patch16_224", "model.encoder.name=test_vit"),
        ("model.encoder.frozen=2", "model.encoder.frozen=none.*model.encoder.frozen=2"),
        ("model.decoder.channels=[16,16,16,8]", r"model.decoder.channels=\[16,16,16,8\]"),
        ("model.decoder.norm=group", "model.decoder.norm=batch.*model.decoder.norm=group"),
        ("model.head.stride=2", "model.head.stride=1.*model.head.stride=2"),
        ("data.image_size=[32,64]", "data.image_size"),
    ],
)
def test_what_a_checkpoint_does_not_fit_is_refused(stopped, root, tmp_path, override, message):
    _, directory = stopped
    source = directory / "checkpoints" / "step_00000004.ckpt"
    with pytest.raises(UserError, match=f"{source}.*{message}.*resume=none"):
        train({**smoke(root, override), "resume": str(source)}, tmp_path / "other", "")


def test_a_named_checkpoint_is_gone_on_from(stopped, tmp_path):
    config, directory = stopped
    path = directory / "checkpoints" / "step_00000002.ckpt"
    result = train({**config, "resume": str(path)}, tmp_path / "other", "")
    assert result["faults"]["resumed_from_step"] == 2
    with pytest.raises(UserError, match="no such file"):
        train({**config, "resume": str(tmp_path / "nowhere.ckpt")}, tmp_path / "third", "")


@pytest.mark.parametrize(("steps", "timed"), [(12, True), (7, False)])
def test_a_run_that_went_on_is_measured_as_any_other(root, tmp_path, steps, timed):
    first = train(smoke(root, "trainer.max_steps=6", "trainer.val_every_steps=12"), tmp_path, "")
    config = smoke(root, f"trainer.max_steps={steps}", "trainer.val_every_steps=12")
    result = train({**config, "resume": "auto"}, tmp_path, "")
    assert result["faults"]["resumed_from_step"] == 6
    memory, speed = result["memory"], result["throughput"]
    assert sum(memory["breakdown"].values()) == memory["peak_bytes"]
    assert memory["static_bytes"] == first["memory"]["static_bytes"]
    assert memory["peak_bytes"] == pytest.approx(first["memory"]["peak_bytes"], rel=0.1)
    assert (speed["step_seconds_median"] is not None) == timed


def test_its_first_steps_are_its_warm_up():
    stopwatch = Stopwatch(1, resumed_step=20)
    memory = MemoryWatch(stopwatch, max_steps=40, resumed_step=20)
    assert stopwatch.warm == 23
    assert memory.measured == range(23, 25)
    assert stopwatch.skipped == {24, 25}
    assert MemoryWatch(stopwatch, max_steps=21, resumed_step=20).measured.start == 20


def test_a_run_directory_named_by_the_time_is_never_found_again(root, tmp_path):
    config = {**smoke(root), "resume": "auto"}
    with pytest.raises(UserError, match=r"hydra\.run\.dir"):
        train(config, tmp_path / "2025-01-31_12-00-00", "")


def poison(monkeypatch, steps):
    from seg4k.training.module import SegmentationModule

    step = SegmentationModule.training_step

    def nan(self, batch, index):
        loss = step(self, batch, index)
        if self.trainer.global_step in steps:
            self.global_batch._sums = self.global_batch._sums * torch.nan
            return loss * torch.nan
        return loss

    monkeypatch.setattr(SegmentationModule, "training_step", nan)


def test_a_loss_that_is_no_number_stops_the_run(root, tmp_path, monkeypatch):
    poison(monkeypatch, {2})
    config = smoke(
        root, "trainer.max_steps=6", "trainer.val_every_steps=6", "trainer.checkpoint_every_steps=1"
    )
    with pytest.raises(UserError, match=r"loss is nan in optimizer step 3.*on_nan=skip"):
        train(config, tmp_path, "")
    content = torch.load(tmp_path / "checkpoints" / "step_00000002.ckpt", weights_only=True)
    assert all(torch.isfinite(value).all() for value in content["state_dict"].values())


@pytest.mark.parametrize("synchronised", [False, True])
def test_or_the_step_is_skipped_and_counted(root, tmp_path, monkeypatch, synchronised):
    if synchronised:  # SyncBatchNorm as it is in one process; its own forward takes tensors of a GPU only
        sync = torch.nn.SyncBatchNorm
        monkeypatch.setattr(sync, "forward", torch.nn.modules.batchnorm._BatchNorm.forward)
        monkeypatch.setattr(
            "seg4k.training.assembly.build_model",
            lambda *args, **options: sync.convert_sync_batchnorm(build_model(*args, **options)),
        )
    poison(monkeypatch, {2, 3})
    monkeypatch.setattr("seg4k.training.checkpoints.KEPT", 6)
    monkeypatch.setattr("seg4k.training.checkpoints.Checkpoints.finish", lambda *_: None)
    config = smoke(
        root,
        "trainer.max_steps=6",
        "trainer.val_every_steps=6",
        "trainer.checkpoint_every_steps=1",
        "trainer.on_nan=skip",
    )
    result = train(config, tmp_path, "")
    assert result["faults"]["skipped_steps"] == 2
    assert result["status"] == "completed"
    before, after, later = (
        torch.load(tmp_path / "checkpoints" / f"step_{step:08d}.ckpt", weights_only=True)["state_dict"]
        for step in (2, 4, 5)
    )
    # Running statistics of batch norms too; their counters count forward passes.
    names = [name for name in before if "num_batches_tracked" not in name]
    assert all(torch.equal(before[name], after[name]) for name in names)
    assert not any(torch.equal(before[name], later[name]) for name in names if name.endswith("running_mean"))


def test_metrics_go_on_where_the_checkpoint_was_written(tmp_path):
    path = tmp_path / "metrics.csv"
    first = MetricsCsv(path)
    for step in (1, 2, 3):
        first.log_metrics({"train_loss": step / 10}, step)
    first.log_metrics({"val_miou": 0.5, "val_loss": 1.0}, 3)
    first.log_metrics({"train_loss": 0.4}, 4)
    whole = path.read_text()
    path.write_text(whole + "5,0.")  # killed in the middle of a line
    again = MetricsCsv(path, resumed_step=3)
    again.log_metrics({"val_miou": 0.5, "val_loss": 1.0}, 3)
    again.log_metrics({"train_loss": 0.4}, 4)
    assert path.read_text() == whole
