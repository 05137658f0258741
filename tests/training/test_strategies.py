import csv
import json
import math
import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from seg4k.errors import UserError
from seg4k.models.vit_unet import build_model
from seg4k.training.global_batch import running_statistics
from seg4k.training.strategies import check_strategy
from seg4k.training.train import train
from seg4k.training.weights import load_model, read_checkpoint
from tests.helpers import make_folder, smoke
from tests.training.runs import ROOT, card, last_weights, weights_hash

TWO = ("trainer.devices=2", "trainer.accelerator=cpu")
# Global batch 4 in each; group norm, so that images do not see each other. Two things make a rounding error
# large, and neither is there in fp64 with SGD. AdamW divides a gradient that is zero but for rounding (of the
# bias of a convolution before a norm of single channels) by its own size: a step of full size out of nothing.
# And an activation within rounding of zero may fall to the other side of a ReLU: a different gradient.
SHAPES = {
    "one process, 4": ("batch.per_device=4",),
    "one process, 1 x 4": ("batch.per_device=1",),
    "ddp, 2 x 2": ("batch.per_device=2", "strategy=ddp", *TWO),
    "fsdp, 2 x 2": ("batch.per_device=2", "strategy=fsdp", *TWO),
    "fsdp, 2 x 1 x 2, stage": (
        "batch.per_device=1",
        "strategy=fsdp",
        "activation_checkpointing=stage",
        *TWO,
    ),
}
COMMON = (
    "model.decoder.norm=group",
    "batch.effective=4",
    "optimizer=sgd",
    "optimizer.lr=0.05",
    "trainer.max_steps=5",
    "trainer.val_every_steps=3",
    "trainer.checkpoint_every_steps=2",
    "logger.tensorboard=false",
)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Five validation images, which two processes cannot share evenly; masks ignored to different degrees."""
    import cv2

    root = make_folder(tmp_path_factory.mktemp("data"), train=4, val=5)
    for index, path in enumerate(sorted((root / "masks" / "train").iterdir())):
        mask = cv2.imread(str(path), cv2.IMREAD_UNCHANGED)
        mask[: 12 * index] = 255
        cv2.imwrite(str(path), mask)
    return root


@pytest.fixture(scope="module")
def runs(root, tmp_path_factory):
    found = {}
    for name, overrides in SHAPES.items():
        directory = tmp_path_factory.mktemp("run")
        train(smoke(root, *COMMON, *overrides, "precision=fp64"), directory, name)
        found[name] = directory
    return found


def curve(directory, column):
    with (directory / "metrics.csv").open() as file:
        return [float(row[column]) for row in csv.DictReader(file) if row[column]]


def difference(one, other):
    assert one.keys() == other.keys()
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


def test_every_shape_of_a_run_reaches_the_same_weights(runs):
    reference = last_weights(runs["one process, 4"])
    start = difference(reference, {name: torch.zeros_like(value) for name, value in reference.items()})
    assert start > 0.1  # there is something to compare
    table = {name: difference(reference, last_weights(directory)) for name, directory in runs.items()}
    print("\n".join(f"{name:24} {value:.1e}" for name, value in table.items()))
    assert max(table.values()) < 1e-11


@pytest.mark.slow
def test_and_in_fp32_within_its_rounding(root, tmp_path):
    shapes = {**SHAPES, "ddp, 2 x 1 x 2": ("batch.per_device=1", "strategy=ddp", *TWO)}
    found = {}
    for name in ("one process, 4", "one process, 1 x 4", "ddp, 2 x 1 x 2"):
        directory = tmp_path / name
        train(smoke(root, *COMMON, *shapes[name], "trainer.max_steps=1"), directory, "")
        found[name] = last_weights(directory)
    assert all(difference(found["one process, 4"], weights) < 1e-6 for weights in found.values())


def without_relus(module):
    for name, child in module.named_children():
        if isinstance(child, torch.nn.ReLU):
            setattr(module, name, torch.nn.SiLU())
        without_relus(child)
    return module


def accumulated(root, tmp_path, *overrides):
    """Largest difference of the weights after 5 steps between batch 4 and 1 x 4."""
    found = []
    for shape in ("one process, 4", "one process, 1 x 4"):
        train(smoke(root, *COMMON, *SHAPES[shape], *overrides), tmp_path / shape, "")
        found.append(last_weights(tmp_path / shape))
    return difference(*found)


def test_and_in_fp32_after_five_steps_where_there_are_no_relus(root, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "seg4k.training.assembly.build_model",
        lambda *args, **options: without_relus(build_model(*args, **options)),
    )
    assert accumulated(root, tmp_path) < 1e-6


def test_and_with_adamw(root, tmp_path):
    assert accumulated(root, tmp_path, "optimizer=adamw", "optimizer.lr=0.001", "precision=fp64") < 1e-11


def test_and_logs_the_same_loss_per_optimizer_step(runs):
    losses = {name: curve(directory, "train_loss") for name, directory in runs.items()}
    for name, values in losses.items():
        assert len(values) == 5, name
        np.testing.assert_allclose(values, losses["one process, 4"], rtol=1e-12, err_msg=name)


def test_validation_is_identical_whatever_the_number_of_processes(runs):
    first = card(runs["one process, 4"])["metrics"]
    assert first["val_samples"] == 5
    for name, directory in runs.items():
        metrics = card(directory)["metrics"]
        assert metrics["val_samples"] == 5, name
        assert metrics["val_miou"] == first["val_miou"], name
        assert metrics["val_iou"] == first["val_iou"], name
        assert metrics["val_loss"] == pytest.approx(first["val_loss"], rel=1e-12), name
        assert len(curve(directory, "val_miou")) == 2


def test_the_card_says_how_many_devices_and_which_strategy(runs):
    for name, directory in runs.items():
        strategy = name.partition(",")[0].replace("one process", "single")
        found = card(directory)
        assert found["strategy"] == strategy
        assert found["device"]["count"] == (1 if strategy == "single" else 2)
        assert found["status"] == "completed"
        assert found["batch"]["effective"] == 4
        peaks = found["memory"]["peak_bytes_per_rank"]
        assert len(peaks) == found["device"]["count"]
        assert found["memory"]["peak_bytes"] == max(peaks)
        speed = found["throughput"]
        assert speed["samples_per_second"] is None or math.isclose(
            speed["samples_per_second"], 4 / speed["step_seconds_median"]
        )


def test_sharding_halves_what_is_static(runs):
    whole, half = (card(runs[name])["memory"]["static_bytes"] for name in ("ddp, 2 x 2", "fsdp, 2 x 2"))
    assert 0.49 < half / whole < 0.56


def test_weights_load_in_plain_torch_whatever_trained_them(runs):
    image = torch.randint(0, 256, (1, 3, 48, 72), dtype=torch.uint8)
    logits = {}
    for name, directory in runs.items():
        loaded = load_model(directory / "checkpoints" / "best.ckpt")
        assert not any(hasattr(parameter, "full_tensor") for parameter in loaded.model.parameters())
        with torch.no_grad():
            logits[name] = loaded.model(image)
    for name, value in logits.items():
        torch.testing.assert_close(value, logits["one process, 4"], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [("fsdp", "single"), ("single", "ddp"), ("ddp", "fsdp")])
def test_a_run_goes_on_under_any_other_strategy(root, tmp_path, first, then):
    shapes = {"single": SHAPES["one process, 4"], "ddp": SHAPES["ddp, 2 x 2"], "fsdp": SHAPES["fsdp, 2 x 2"]}
    # AdamW has moments to carry over.
    common = [word for word in COMMON if not word.startswith("optimizer")]
    common += ["optimizer.lr=0.001", "precision=fp64"]
    train(smoke(root, *common, *shapes[first], "trainer.max_steps=4"), tmp_path / "run", "")
    source = tmp_path / "run" / "checkpoints" / "last.ckpt"
    found = {}
    for strategy in (first, then):
        config = smoke(root, *common, *shapes[strategy], "trainer.max_steps=6")
        train({**config, "resume": str(source)}, tmp_path / strategy, "")
        assert card(tmp_path / strategy)["faults"]["resumed_from_step"] == 4
        assert len(curve(tmp_path / strategy, "train_loss")) == 2
        found[strategy] = last_weights(tmp_path / strategy)
    assert difference(found[first], found[then]) < 1e-6


def test_fsdp_goes_on_with_an_optimizer_that_keeps_nothing(root, tmp_path):
    shape = (*COMMON, *SHAPES["fsdp, 2 x 2"], "optimizer.momentum=0.0", "precision=fp64")
    train(smoke(root, *shape, "trainer.max_steps=2"), tmp_path / "begun", "")
    source = tmp_path / "begun" / "checkpoints" / "last.ckpt"
    train({**smoke(root, *shape, "trainer.max_steps=4"), "resume": str(source)}, tmp_path / "then", "")
    single = (*COMMON, *SHAPES["one process, 4"], "optimizer.momentum=0.0", "precision=fp64")
    train(smoke(root, *single, "trainer.max_steps=2"), tmp_path / "single", "")
    source = tmp_path / "single" / "checkpoints" / "last.ckpt"
    train({**smoke(root, *single, "trainer.max_steps=4"), "resume": str(source)}, tmp_path / "same", "")
    assert difference(last_weights(tmp_path / "then"), last_weights(tmp_path / "same")) < 1e-11


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_fsdp_goes_on_with_other_settings(root, tmp_path, optimizer):
    shape = (*COMMON, *SHAPES["fsdp, 2 x 2"], "trainer.ema_decay=0.0", f"optimizer={optimizer}")
    none = ["optimizer.momentum=0.0"] if optimizer == "sgd" else []
    train(smoke(root, *shape, *none, "trainer.max_steps=2"), tmp_path / "first", "")
    source = tmp_path / "first" / "checkpoints" / "last.ckpt"
    lower = (*shape, "optimizer.lr=1e-12", "trainer.max_steps=4")
    train({**smoke(root, *lower), "resume": str(source)}, tmp_path / "then", "")
    groups = read_checkpoint(tmp_path / "then" / "checkpoints" / "last.ckpt")["optimizer_states"][0]
    assert all(float(group["initial_lr"]) <= 1e-12 for group in groups["param_groups"])
    assert all(group.get("momentum", 0.9) == 0.9 for group in groups["param_groups"])
    before, after = last_weights(tmp_path / "first"), last_weights(tmp_path / "then")
    names = [name for name in before if name.endswith(("weight", "bias"))]
    assert max(float((before[name] - after[name]).abs().max()) for name in names) < 1e-9


@pytest.mark.slow
def test_batch_norm_keeps_the_same_statistics_in_every_process(root, tmp_path):
    shape = ("batch.per_device=2", "batch.effective=4", "model.decoder.norm=batch", *TWO)
    found = {}
    for strategy in ("ddp", "fsdp"):
        config = smoke(root, "trainer.max_steps=2", f"strategy={strategy}", "optimizer=sgd", *shape)
        train(config, tmp_path / strategy, "")
        found[strategy] = last_weights(tmp_path / strategy)
    assert difference(found["ddp"], found["fsdp"]) < 1e-5


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.devices=2"], "strategy=ddp"),
        (["trainer.num_nodes=2"], "strategy=ddp"),
        (["trainer.devices=0"], "1 or more"),
        (["strategy=ddp", "trainer.devices=2", "strategy.sync_batchnorm=true"], "on GPUs only"),
        (["strategy=fsdp", "trainer.devices=2", "strategy.cpu_offload=true"], "nowhere to offload"),
        (["strategy=ddp", "strategy.static_graph=true"], "cannot accumulate 2"),
        (
            [
                "strategy=ddp",
                "batch.effective=1",
                "strategy.static_graph=true",
                "strategy.find_unused_parameters=true",
            ],
            "exclude each other",
        ),
        (["strategy=fsdp", "trainer.ema_decay=0.9"], "moving average"),
        (["strategy=fsdp", "optimizer=adamw_8bit"], "inside a block"),
        (["precision=fp16"], "needs a GPU"),
        (["strategy=fsdp", "trainer.devices=2", "precision=fp16"], "no gradient scaler"),
        (["trainer.accelerator=tpu"], "auto, cpu, gpu"),
        (["trainer.accelerator=mps"], "auto, cpu, gpu"),
    ],
)
def test_what_cannot_be_combined_is_refused_with_the_reason(root, tmp_path, overrides, message):
    with pytest.raises(UserError, match=message):
        train(smoke(root, "trainer.accelerator=cpu", *overrides), tmp_path, "")
    assert json.loads((tmp_path / "run_card.json").read_text())["status"] == "failed"


def test_a_gpu_that_is_not_there_is_refused(root, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"trainer\.accelerator=gpu.*no CUDA device"):
        check_strategy(smoke(root, "trainer.accelerator=gpu"))


@pytest.mark.parametrize("accelerator", ["auto", "cpu"])
def test_where_lightning_would_take_apples_device_the_cpu_trains(root, tmp_path, monkeypatch, accelerator):
    from lightning.pytorch.accelerators import MPSAccelerator

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(MPSAccelerator, "is_available", staticmethod(lambda: True))
    config = smoke(
        root, f"trainer.accelerator={accelerator}", "trainer.max_steps=1", "logger.tensorboard=false"
    )
    assert "CPU" in train(config, tmp_path, "")["device"]["name"]


def test_torchrun_and_the_configuration_must_agree(root, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UserError, match="torchrun started 4"):
        check_strategy(smoke(root, "strategy=ddp", "trainer.devices=2"))


SLURM = {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_NAME": "train"}


@pytest.mark.parametrize("change", [{"SLURM_NTASKS": "4"}, {"SLURM_NTASKS_PER_NODE": "1"}])
def test_slurm_and_the_configuration_must_agree(root, monkeypatch, change):
    for name, value in {**SLURM, **change}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="srun --nodes=1 --ntasks-per-node=2"):
        check_strategy(smoke(root, "strategy=ddp", *TWO))
    check_strategy(smoke(root))  # a single device in an allocation of many


def started(root, directory, *overrides):
    return [
        *("experiment=smoke", "data=folder", f"data.root={root}", "data.image_size=[32,48]"),
        *("data.val_size=null", *COMMON, *SHAPES["ddp, 2 x 2"], "precision=fp64"),
        *(f"hydra.run.dir={directory}", *overrides),
    ]


def environment(**more):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    return {**kept, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg", **more}


@pytest.mark.slow
def test_torchrun_starts_it_as_well(root, tmp_path, runs):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", str(ROOT / "train.py")]
    overrides = started(root, tmp_path / "run", "preflight=true")
    subprocess.run([*command, *overrides], env=environment(), check=True, cwd=tmp_path, timeout=300)
    assert weights_hash(tmp_path / "run") == weights_hash(runs["ddp, 2 x 2"])
    found = card(tmp_path / "run")
    assert found["device"]["count"] == 2
    assert found["memory"]["predicted_peak_bytes"] > 0


@pytest.mark.slow
def test_under_torchrun_a_plan_that_does_not_fit_ends_both(root, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", str(ROOT / "train.py")]
    auto = ("activation_checkpointing=auto", "activation_checkpointing.budget=1MiB")
    overrides = started(root, tmp_path / "run", *auto)
    result = subprocess.run(
        [*command, *overrides], env=environment(), cwd=tmp_path, timeout=300, capture_output=True, text=True
    )
    assert result.returncode != 0
    assert card(tmp_path / "run")["error"].startswith("PlanDoesNotFit")
    assert "the first process ended with PlanDoesNotFit" in result.stderr
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.slow
def test_slurm_starts_it_as_well(root, tmp_path, runs):
    job = str(random.SystemRandom().randrange(10**6))  # its last digits are the port
    processes = [
        subprocess.Popen(
            [sys.executable, str(ROOT / "train.py"), *started(root, tmp_path / "run")],
            env=environment(
                **SLURM,
                SLURM_JOB_ID=job,
                SLURM_NODELIST="127.0.0.1",
                SLURM_NNODES="1",
                SLURM_NODEID="0",
                SLURM_PROCID=str(rank),
                SLURM_LOCALID=str(rank),
            ),
            cwd=tmp_path,
        )
        for rank in range(2)
    ]
    assert [process.wait(timeout=300) for process in processes] == [0, 0]
    assert weights_hash(tmp_path / "run") == weights_hash(runs["ddp, 2 x 2"])
    assert card(tmp_path / "run")["device"]["count"] == 2


PREFLIGHT = {"plan": {"encoder.stage1": "recompute"}, "predicted_peak_bytes": 12345}


def test_the_first_process_predicts_for_all(root, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("seg4k.training.assembly.before_training", lambda *_: asked.append(1) or PREFLIGHT)
    told = []

    def start(launcher):
        told.append(json.loads(launcher.job.to_json()))
        raise RuntimeError("enough")

    monkeypatch.setattr("seg4k.training.launch.Launcher._start", start)
    with pytest.raises(RuntimeError, match="enough"):
        train(smoke(root, "strategy=ddp", "preflight=true", *TWO), tmp_path, "")
    assert len(asked) == 1
    assert told[0]["preflight"] == PREFLIGHT


def test_a_further_process_does_not_predict_again(root, tmp_path, monkeypatch):
    monkeypatch.setattr("seg4k.training.assembly.before_training", lambda *_: pytest.fail("asked again"))
    config = smoke(root, "preflight=true", "activation_checkpointing=auto")
    found = train(config, tmp_path, "", preflight=PREFLIGHT)
    assert found["activation_checkpointing"]["segments"] == [
        {"name": "encoder.stage1", "policy": "recompute"}
    ]
    assert found["memory"]["predicted_peak_bytes"] == 12345


def test_synchronised_batch_norms_keep_their_names(root):
    model = build_model(smoke(root)["model"], num_classes=3, image_size=(32, 48))
    names = list(model.state_dict())
    each = len(running_statistics(model))
    assert each == len(running_statistics(model, synchronised=False)) > 0
    torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert list(model.state_dict()) == names
    assert not running_statistics(model, synchronised=False)  # alike in every process by themselves
    assert len(running_statistics(model)) == each  # but put back with the others where a step is skipped


SAVED = {
    "fsdp, bf16, stage": (*SHAPES["fsdp, 2 x 2"], "precision=bf16", "activation_checkpointing=stage"),
    "ddp, fp32, selective": (*SHAPES["ddp, 2 x 2"], "activation_checkpointing=selective"),
    "single, fp64, block": ("batch.per_device=4", "precision=fp64", "activation_checkpointing=block"),
    "single, bf16, none": ("batch.per_device=1", "precision=bf16"),
}


@pytest.fixture(scope="module")
def saved(root, tmp_path_factory):
    found = {}
    for name, overrides in SAVED.items():
        found[name] = tmp_path_factory.mktemp("saved")
        train(smoke(root, *COMMON, *overrides, "trainer.max_steps=2"), found[name], name)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("first", SAVED)
@pytest.mark.parametrize("then", SAVED)
def test_weights_of_any_strategy_plan_and_precision_load_under_any_other(root, tmp_path, saved, first, then):
    source = saved[first] / "checkpoints" / "last.ckpt"
    before = last_weights(saved[first])
    # Steps too small to see: where the weights are still those of the file, they were read from it.
    config = smoke(root, *COMMON, *SAVED[then], "trainer.max_steps=3", "optimizer.momentum=0.0")
    content = torch.load(source, weights_only=True)
    for group in content["optimizer_states"][0]["param_groups"]:
        group["initial_lr"] = group["lr"] = 1e-9
    content["lr_schedulers"][0]["base_lrs"] = [1e-9] * len(content["lr_schedulers"][0]["base_lrs"])
    torch.save(content, tmp_path / "slow.ckpt")
    train({**config, "resume": str(tmp_path / "slow.ckpt")}, tmp_path / "run", "")
    after = last_weights(tmp_path / "run")
    assert difference(before, after) < 1e-6
    assert difference(before, {name: torch.zeros_like(one) for name, one in before.items()}) > 0.1
    plain = load_model(source).model.state_dict()
    assert all(torch.equal(plain[name], before[f"model.{name}"].float()) for name in plain)
