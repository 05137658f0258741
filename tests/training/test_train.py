import csv
import json
import re
import signal
import time

import cv2
import pytest
import torch

from seg4k.errors import UserError
from seg4k.training.planning import Task, predict
from seg4k.training.train import train
from seg4k.training.weights import load_model, read_checkpoint
from tests.helpers import CLASSES, make_folder, smoke


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def run(root, tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    config = smoke(root, "trainer.max_steps=6", "trainer.val_every_steps=4", "optimizer.lr=0.01", "seed=0")
    return train(config, directory, "python train.py experiment=smoke"), directory, config


def weights_of(directory):
    return read_checkpoint(directory / "checkpoints" / "last.ckpt")["state_dict"]


def test_the_run_card_keeps_the_contract(run):
    card, directory, config = run
    assert json.loads((directory / "run_card.json").read_text()) == json.loads(json.dumps(card))
    assert card["schema"] == 1
    assert card["status"] == "completed"
    assert card["error"] is None
    assert card["command"] == "python train.py experiment=smoke"
    assert card["config"] == config
    assert card["seed"] == 0
    assert card["weights"] == "random"
    assert card["precision"] == "32-true"
    assert card["batch"] == {"per_device": 1, "accumulate": 2, "effective": 2, "image_size": [32, 48]}
    assert card["device"]["count"] == 1
    assert card["device"]["memory_bytes"] > 2**30
    assert card["memory"]["peak_source"] == "cpu_allocator"
    assert card["memory"]["peak_bytes"] > card["memory"]["static_bytes"] > 0
    speed = card["throughput"]
    assert speed["samples_per_second"] == pytest.approx(2 / speed["step_seconds_median"])
    assert 0 <= speed["data_wait_fraction"] < 1
    assert card["activation_checkpointing"] == {"mode": "none", "segments": []}
    assert list(card["metrics"]["val_iou"]) == ["left", "right", "nowhere"]
    assert card["metrics"]["val_iou"]["nowhere"] is None or card["metrics"]["val_iou"]["nowhere"] == 0
    assert card["metrics"]["val_samples"] == 3
    assert "| status | completed |" in (directory / "run_card.md").read_text()


def test_static_bytes_are_parameters_gradients_and_two_moments(run):
    card, directory, _ = run
    loaded = load_model(directory / "checkpoints" / "last.ckpt")
    parameters = sum(p.numel() * 4 for p in loaded.model.parameters())
    buffers = sum(b.numel() * b.element_size() for b in loaded.model.buffers())
    steps = 4 * sum(1 for _ in loaded.model.parameters())  # AdamW's step count of each parameter
    assert card["memory"]["static_bytes"] == pytest.approx(4 * parameters + buffers + steps, rel=2e-3)
    parts = card["memory"]["breakdown"]
    assert parts["gradients"] == parameters
    assert sum(parts.values()) == card["memory"]["peak_bytes"]


def test_a_run_of_one_step_has_its_whole_memory_on_the_card(run, root, tmp_path):
    longer, _, config = run
    card = train(
        {**config, "trainer": {**config["trainer"], "max_steps": 1, "val_every_steps": 1}},
        tmp_path / "one",
        "",
    )
    assert card["memory"]["static_bytes"] == longer["memory"]["static_bytes"]
    parts = card["memory"]["breakdown"]
    assert {name: parts[name] for name in ("parameters", "gradients", "optimizer")} == {
        name: longer["memory"]["breakdown"][name] for name in ("parameters", "gradients", "optimizer")
    }
    assert sum(parts.values()) == card["memory"]["peak_bytes"]


def test_moments_are_numbered_as_the_model_has_its_parameters(run):
    _, directory, _ = run
    path = directory / "checkpoints" / "last.ckpt"
    states = read_checkpoint(path)["optimizer_states"][0]
    parameters = list(load_model(path).model.parameters())
    numbers = [number for group in states["param_groups"] for number in group["params"]]
    assert sorted(numbers) == list(range(len(parameters)))
    assert numbers != sorted(numbers)  # the groups have another order
    assert all(states["state"][n]["exp_avg"].shape == one.shape for n, one in enumerate(parameters))


def test_what_a_run_leaves(run):
    _, directory, _ = run
    names = {path.name for path in directory.iterdir()}
    assert {
        "run_card.json",
        "run_card.md",
        "metrics.csv",
        "tensorboard",
        "val_samples.png",
        "checkpoints",
    } <= names
    assert {path.name for path in (directory / "checkpoints").iterdir()} == {"best.ckpt", "last.ckpt"}
    with (directory / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    losses = [float(row["train_loss"]) for row in rows if row["train_loss"]]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    assert [row["step"] for row in rows if row["val_miou"]] == ["4", "6"] or [
        row["step"] for row in rows if row["val_miou"]
    ] == ["3", "6"]
    picture = cv2.imread(str(directory / "val_samples.png"))
    assert picture.shape[0] > 200
    colours = {tuple(pixel[::-1]) for pixel in picture.reshape(-1, 3)}
    assert {tuple(entry["colour"]) for entry in CLASSES["classes"][:2]} <= colours


def test_the_same_seed_gives_the_same_bits_and_another_seed_does_not(run, root, tmp_path):
    _, directory, config = run
    train(config, tmp_path / "again", "")
    train({**config, "seed": 1}, tmp_path / "other", "")
    first, again, other = (weights_of(d) for d in (directory, tmp_path / "again", tmp_path / "other"))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_a_checkpoint_loads_without_the_configuration_that_made_it(run, tmp_path):
    card, directory, _ = run
    copy = tmp_path / "moved.ckpt"
    copy.write_bytes((directory / "checkpoints" / "last.ckpt").read_bytes())
    loaded = load_model(copy)
    assert loaded.classes.names == ("left", "right", "nowhere")
    assert loaded.classes.colours[0] == (200, 30, 30)
    assert loaded.version
    assert not loaded.model.training
    image = torch.zeros(1, 3, 40, 60)
    image[..., 30:] = torch.tensor([0.75, 0.1, 0.1]).view(3, 1, 1)
    with torch.no_grad():
        assert loaded.model(image).shape == (1, 3, 40, 60)
    about = read_checkpoint(copy)["seg4k"]
    assert about["encoder"] == "test_vit"
    assert about["normalisation"] == {"mean": [0.5] * 3, "std": [0.5] * 3}
    assert card["config"] == about["config"]


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no such file"), (b"junk", "damaged"), ({"state_dict": {}}, "not written by seg4k")],
)
def test_bad_checkpoints(tmp_path, content, message):
    path = tmp_path / "x.ckpt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(UserError, match=message):
        load_model(path)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("batch.effective=3", r"batch.effective=2"),
        ("batch.per_device=0", "1 or more"),
        ("precision=fp8", "fp32, bf16, fp16"),
        ("trainer.max_steps=0", "trainer.max_steps"),
        ("loss.ignore=3", "loss.ignore"),
    ],
)
def test_mistakes_leave_a_card_that_says_so(root, tmp_path, override, message):
    config = smoke(root, "batch.per_device=2")
    keys, value = override.split("=")
    group, key = keys.rpartition(".")[::2]
    (config[group] if group else config)[key] = int(value) if value.isdigit() else value
    with pytest.raises(UserError, match=message):
        train(config, tmp_path, "")
    card = json.loads((tmp_path / "run_card.json").read_text())
    assert card["status"] == "failed"
    assert card["error"].startswith("UserError")


def test_writing_checkpoints_is_not_waiting_for_data(root, tmp_path, monkeypatch):
    from seg4k.training.checkpoints import AtomicCheckpointIO

    save = AtomicCheckpointIO.save_checkpoint

    def slow(self, *arguments, **options):
        time.sleep(2.0)
        save(self, *arguments, **options)

    monkeypatch.setattr(AtomicCheckpointIO, "save_checkpoint", slow)
    steps = ("trainer.max_steps=8", "trainer.val_every_steps=8", "trainer.checkpoint_every_steps=1")
    speed = train(smoke(root, *steps), tmp_path, "")["throughput"]
    assert speed["step_seconds_median"] < 2.0
    assert speed["data_wait_fraction"] * speed["step_seconds_median"] < 1.5


def test_waiting_for_data_is_counted(root, tmp_path, monkeypatch):
    from seg4k.data.datamodule import SegmentationDataModule

    move = SegmentationDataModule.on_before_batch_transfer

    def slow(self, *arguments):
        time.sleep(1.0 if self.trainer.training else 0.0)
        return move(self, *arguments)

    monkeypatch.setattr(SegmentationDataModule, "on_before_batch_transfer", slow)
    speed = train(smoke(root, "trainer.max_steps=7", "trainer.val_every_steps=7"), tmp_path, "")["throughput"]
    assert speed["step_seconds_median"] > 2.0  # two micro-batches
    assert speed["data_wait_fraction"] > 0.5


def test_running_out_of_memory_is_told_apart(root, tmp_path, monkeypatch):
    def no_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    monkeypatch.setattr("seg4k.training.module.SegmentationModule.training_step", no_memory)
    # Long enough that the ledger is not open in the first step: it would count what other tests have left.
    with pytest.raises(torch.OutOfMemoryError):
        train(smoke(root, "trainer.max_steps=8", "trainer.val_every_steps=8"), tmp_path, "")
    card = json.loads((tmp_path / "run_card.json").read_text())
    assert card["status"] == "out_of_memory"
    # In the first step nothing static was counted: what leads is known by trace. Images are small here.
    assert "Memory ran out, led by optimizer state (activations " in card["error"]
    assert re.search(r"None of .*activation_checkpointing=stage, .* fit with clearly less", card["error"])
    assert card["metrics"]["val_miou"] is None


def test_an_interrupted_run_says_so(root, tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("seg4k.training.module.SegmentationModule.training_step", interrupt)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(smoke(root), tmp_path, "")
    assert signal.getsignal(signal.SIGINT) is before
    assert json.loads((tmp_path / "run_card.json").read_text())["status"] == "interrupted"


def test_the_moving_average_is_what_is_saved(root, tmp_path):
    plain = train(smoke(root, "trainer.ema_decay=0.0"), tmp_path / "plain", "")
    averaged = train(smoke(root, "trainer.ema_decay=0.999999"), tmp_path / "ema", "")
    assert plain["status"] == averaged["status"] == "completed"
    one, other = (weights_of(tmp_path / name) for name in ("plain", "ema"))
    name = "model.head.weight"
    assert not torch.equal(one[name], other[name])


@pytest.mark.parametrize(("mode", "precision"), [("stage", "fp32"), ("selective", "bf16")])
def test_activation_checkpointing_changes_no_bit_of_a_run(root, tmp_path, mode, precision):
    arguments = [f"precision={precision}", "model.encoder.drop_path=0.3"]
    none = train(smoke(root, *arguments), tmp_path / "none", "")
    some = train(smoke(root, *arguments, f"activation_checkpointing={mode}"), tmp_path / mode, "")
    assert some["activation_checkpointing"]["segments"]
    first, second = weights_of(tmp_path / "none"), weights_of(tmp_path / mode)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert none["metrics"] == some["metrics"]


def test_a_run_with_adamw_8bit_goes_on_exactly(root, tmp_path, monkeypatch):
    pytest.importorskip("torchao")
    monkeypatch.setattr("seg4k.training.checkpoints.Checkpoints.finish", lambda *_: None)
    config = smoke(
        root,
        "optimizer=adamw_8bit",
        "trainer.max_steps=4",
        "trainer.val_every_steps=4",
        "trainer.checkpoint_every_steps=2",
    )
    train(config, tmp_path / "whole", "")
    middle = tmp_path / "whole" / "checkpoints" / "step_00000002.ckpt"
    moments = [state["exp_avg"] for state in read_checkpoint(middle)["optimizer_states"][0]["state"].values()]
    assert any(isinstance(moment, dict) and moment["codes"].dtype == torch.uint8 for moment in moments)
    train({**config, "resume": str(middle)}, tmp_path / "again", "")
    whole, again = (
        read_checkpoint(tmp_path / name / "checkpoints" / "step_00000004.ckpt")["state_dict"]
        for name in ("whole", "again")
    )
    assert all(torch.equal(whole[name], again[name]) for name in whole)


@pytest.mark.slow
def test_what_adamw_8bit_and_fp64_take_is_predicted(root):
    def peak(*overrides):
        return predict(smoke(root, *overrides), Task(3, 3, 255)).report["predicted"]["static_bytes"]

    assert peak("optimizer=adamw_8bit") < 0.85 * peak("optimizer=adamw")
    assert peak("precision=fp64") == pytest.approx(2 * peak("precision=fp32"), rel=0.05)
