import json
import re

import pytest
import torch

from seg4k.activation_checkpointing import make_plan
from seg4k.cli import main
from seg4k.errors import PlanDoesNotFit, UserError
from seg4k.memory.budget import parse_bytes
from seg4k.memory.cache import cache_directory
from seg4k.memory.trace import trace
from seg4k.training.out_of_memory import after_out_of_memory
from seg4k.training.plan_answer import answer
from seg4k.training.planning import Task, before_training, device_of, lowering, predict
from seg4k.training.traced_step import build_step
from seg4k.training.train import train
from tests.helpers import configuration, make_folder, smoke
from tests.training.runs import card, last_weights, run

TASK = Task(5, 3, 255)
TINY = ("experiment=smoke", "device=rtx4090", "plan.num_classes=5", "batch.effective=1")
GIB = 1 << 30


def traced(*overrides, plan=None, rules="cuda"):
    return trace(build_step(configuration(*TINY, *overrides), 5, 3, 255), plan, rules=rules)


@pytest.mark.parametrize(
    ("text", "size"), [("24GiB", 24 * GIB), ("500 MB", 500_000_000), (7, 7), ("1.5kib", 1536)]
)
def test_bytes_in_words(text, size):
    assert parse_bytes(text, "x") == size


@pytest.mark.parametrize("text", ["many", "24 gallons", "0", "1.2.3GiB", "-5", ".", ".GiB", "", 400 * "9"])
def test_bytes_in_other_words(text):
    with pytest.raises(UserError, match="x="):
        parse_bytes(text, "x")


DEEP = ("model.encoder.name=vit_tiny_patch16_224",)  # parameters decide


def test_sharding_divides_what_stays_and_adds_what_is_gathered():
    one, fsdp = traced(*DEEP), traced(*DEEP, "strategy=fsdp", "trainer.devices=8")
    assert fsdp.static_bytes == pytest.approx(one.static_bytes / 8, rel=0.05)
    assert one.peak_kinds["gathered"] == 0
    assert fsdp.flops() == one.flops()
    kept = traced(*DEEP, "strategy=fsdp", "trainer.devices=8", "strategy.reshard_after_forward=false")
    weights = one.static_bytes / 4
    assert kept.peak_bytes - fsdp.peak_bytes > weights / 4
    assert kept.peak_kinds["gathered"] > weights / 2 > fsdp.peak_kinds["gathered"] > 0


def test_sharded_step_can_be_traced_again_and_planned():
    config = configuration(
        *TINY,
        "strategy=fsdp",
        "trainer.devices=4",
        "data.image_size=[256,256]",
        "activation_checkpointing=auto",
    )
    wide = predict(config, TASK)
    assert len(wide.plan) == 0
    peak = wide.report["baseline"]["peak_bytes"]
    config["activation_checkpointing"]["budget"] = int(peak * 0.8)
    tight = predict(config, TASK)
    assert tight.report["predicted"]["peak_bytes"] <= peak * 0.8
    assert tight.report["baseline"]["peak_bytes"] == peak
    assert tight.plan


def test_buckets_of_ddp_are_counted():
    two = ("strategy=ddp", "trainer.devices=2")
    single, ddp = traced(*DEEP), traced(*DEEP, *two)
    gradients = single.static_bytes / 4
    assert ddp.static_bytes == pytest.approx(
        single.static_bytes, rel=0.01
    )  # gradients are views of the buckets
    assert 0 <= ddp.peak_bytes - single.peak_bytes <= gradients
    single, ddp = traced(*DEEP, "batch.effective=4"), traced(*DEEP, *two, "batch.effective=8")
    # Between exchanges gradients lie beside the buckets.
    assert ddp.peak_bytes - single.peak_bytes == pytest.approx(gradients, rel=0.1)


def test_state_in_host_memory():
    there = traced("strategy=fsdp", "trainer.devices=2")
    away = traced("strategy=fsdp", "trainer.devices=2", "strategy.cpu_offload=true")
    assert away.static_bytes == 0
    assert away.peak_bytes < there.peak_bytes - there.static_bytes / 2


def test_single_strategy_on_several_devices_is_a_mistake():
    config = configuration(*TINY, "trainer.devices=8")
    with pytest.raises(UserError, match="strategy=ddp"):
        predict(config, TASK)


def test_first_step_has_no_optimizer_state():
    first, later = traced(*DEEP, "trainer.max_steps=1"), traced(*DEEP, "trainer.max_steps=2")
    assert first.peak_bytes < later.peak_bytes
    assert first.static_bytes == later.static_bytes


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("data"), size=(600, 600))


def real(root, folder, *overrides):
    """Predicted over measured peak of a run on the CPU."""
    run(
        root,
        folder,
        "device=cpu",
        "preflight=true",
        "trainer.accelerator=cpu",
        "model.encoder.name=vit_tiny_patch16_224",
        "data.image_size=[256,256]",
        "trainer.val_every_steps=20",
        "trainer.checkpoint_every_steps=20",
        *overrides,
    )
    memory = card(folder)["memory"]
    return memory["predicted_peak_bytes"] / memory["peak_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("steps", [1, 3])
def test_short_runs_against_the_ledger(root, tmp_path, precision, steps):
    small = ("data.image_size=[64,64]",)  # where a missing or added optimizer state shows
    ratio = real(root, tmp_path / "run", *small, f"trainer.max_steps={steps}", f"precision={precision}")
    assert ratio == pytest.approx(1, abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ("strategy=fsdp",),
        ("strategy=fsdp", "precision=bf16"),
        ("strategy=fsdp", "strategy.reshard_after_forward=false"),
        ("strategy=fsdp", "batch.effective=4"),
        ("strategy=fsdp", "activation_checkpointing=stage"),
        ("strategy=ddp",),
        ("strategy=ddp", "batch.effective=4"),
    ],
)
def test_two_processes_against_the_ledger(root, tmp_path, overrides):
    # Large enough that a copy of gloo's which waits for the other process (see cpu_rules) is under 5%.
    more = ("trainer.devices=2", "trainer.max_steps=5", "batch.effective=2", "data.image_size=[512,512]")
    assert real(root, tmp_path / "run", *more, *overrides) == pytest.approx(1, abs=0.05)


def test_speeds_of_this_machine_are_measured_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = configuration(*TINY, "device=this", "trainer.accelerator=cpu", "activation_checkpointing=stage")
    first = predict(config, TASK)
    (kept,) = cache_directory().glob("*.json")
    measured = json.loads(kept.read_text())
    assert {"encoder.stage0.block0.attn", "encoder.stage0.block0.mlp", "neck.stride8"} <= set(measured)
    assert "encoder.stage0" not in measured
    assert min(measured.values()) > 0
    # Of what was measured, not of a roofline: slower segments make the plan slower.
    kept.write_text(json.dumps({name: 100.0 for name in measured}))
    slow = predict(config, TASK)
    assert slow.step.seconds > 100 * len(measured) > first.step.seconds
    assert slow.report["predicted"]["slowdown"] > 1.1
    assert slow.step.trace == first.step.trace


def test_a_run_that_plans_draws_the_same_numbers(root, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # nothing is measured yet
    found = {}
    for mode in ("none", "auto"):
        config = smoke(
            root, "trainer.max_steps=2", f"activation_checkpointing={mode}", "device=this", "optimizer=sgd"
        )
        train(config, tmp_path / mode, "")
        found[mode] = last_weights(tmp_path / mode)
    assert cache_directory().is_dir()
    assert all(torch.equal(value, found["auto"][name]) for name, value in found["none"].items())


def test_the_cpu_has_nowhere_to_offload_to():
    large = ("device=cpu", "data.image_size=[256,256]")
    budget = int(0.8 * traced(*large, rules="cpu").peak_bytes)
    more = ("activation_checkpointing=auto", f"activation_checkpointing.budget={budget}")
    found = predict(configuration(*TINY, *large, *more), TASK)
    assert found.plan
    assert "offload" not in set(map(str, found.plan.values()))
    assert found.report["predicted"]["peak_bytes"] <= budget


def test_a_budget_is_for_auto_and_breaks_no_other_mode(root):
    config = configuration(*TINY, "preflight=true", "activation_checkpointing.budget=1KiB")
    assert before_training(config, TASK) is not None
    with pytest.raises(PlanDoesNotFit):
        predict(config, TASK)


BUDGET = "activation_checkpointing.budget=400GiB"


def test_a_budget_is_held_against_the_device():
    """Asking for more than the device has gives no more than it has."""
    tight = {"memory_bytes": 6 << 20, "reserve_bytes": 1 << 20}
    refused = (
        r"activation_checkpointing.budget=400.00 GiB is above the 5.0 MiB that NVIDIA GeForce RTX 4090 has"
    )
    for mode in ("none", "auto"):
        config = replace_device(configuration(*TINY, f"activation_checkpointing={mode}", BUDGET), **tight)
        with pytest.raises(PlanDoesNotFit, match=refused):
            predict(config, TASK)
        with pytest.raises(PlanDoesNotFit, match=r"No plan fits in 5\.0 MiB"):
            before_training(config, TASK)
    said = answer(replace_device(configuration(*TINY, "plan.maximize=batch", BUDGET), **tight))
    assert "No plan fits in 5.0 MiB" in said["message"]
    assert "budget=400.00 GiB is above" in said["message"]


@pytest.mark.parametrize(
    ("given", "bound", "sentence"),
    [
        (
            "400GiB",
            24564 * 2**20 - GIB,
            "The device bounds it: activation_checkpointing.budget=400.00 GiB is above",
        ),
        (
            None,
            24564 * 2**20 - GIB,
            "The device bounds it: NVIDIA GeForce RTX 4090 has 22.99 GiB for tensors",
        ),
        ("8GiB", 8 * GIB, "activation_checkpointing.budget=8.00 GiB bounds it"),
    ],
)
def test_the_report_says_what_bounds_the_budget(given, bound, sentence):
    said = answer(configuration(*TINY, f"activation_checkpointing.budget={given or 'null'}"))
    assert said["report"]["budget_bytes"] == bound
    assert sentence in said["text"]


def test_nothing_fits():
    config = configuration(*TINY, "activation_checkpointing=auto", "activation_checkpointing.budget=1KiB")
    with pytest.raises(PlanDoesNotFit) as caught:
        predict(config, TASK)
    message = str(caught.value)
    assert "The smallest budget that does is" in message
    assert "optimizer=sgd" in message
    assert "batch.per_device" not in message
    assert caught.value.report["feasible"] is False


def lowered(*overrides):
    config = configuration(*TINY, "activation_checkpointing=auto", *overrides)
    return set(lowering(config, device_of(config)))


def test_what_lowers_the_need_is_what_is_not_set():
    assert {"optimizer=sgd", "optimizer=adamw_8bit"} <= lowered()
    assert "activation_checkpointing.offload=true" not in lowered()
    offload = "activation_checkpointing.offload=false"
    found = lowered(
        "optimizer=sgd",
        "batch.per_device=2",
        "batch.effective=2",
        offload,
        "loss.strips=1",
        "model.head.stride=2",
    )
    assert {"batch.per_device=1", "activation_checkpointing.offload=true", "loss.strips=auto"} <= found
    assert not {"optimizer=sgd", "optimizer=adamw_8bit", "model.head.stride=2"} & found
    assert "activation_checkpointing.offload=true" not in lowered("device=cpu", offload)


def test_no_optimizer_is_advised_that_needs_more():
    # sgd keeps 4 bytes a parameter, adamw_8bit 2; the latter is not for fsdp.
    assert not any(option.startswith("optimizer=") for option in lowered("optimizer=adamw_8bit"))
    assert "optimizer=adamw_8bit" not in lowered("strategy=fsdp", "trainer.devices=2")


def test_what_is_known_is_told_where_not_one_image_fits():
    config = configuration(*TINY, "plan.maximize=batch", "activation_checkpointing.budget=1KiB")
    said = answer(config)
    assert "No plan fits" in said["message"]
    assert said["report"]["feasible"] is False
    assert f"{said['report']['predicted']['peak_bytes']} bytes" in said["message"]
    assert said["report"]["segments"]


@pytest.mark.slow
def test_largest_batch():
    size = ("data.image_size=[512,512]", "activation_checkpointing=auto", "plan.maximize=batch")
    said = answer(configuration(*TINY, *size, "activation_checkpointing.budget=64MiB"))
    assert said["report"]["predicted"]["peak_bytes"] <= 64 << 20
    assert "largest batch per device that fits" in said["text"]


def test_after_running_out_of_memory():
    config = configuration(*TINY, "batch.per_device=2", "batch.effective=2", "data.image_size=[256,256]")
    memory = {"peak_bytes": 9 * GIB, "peak_source": "cuda_allocator", "reserved_bytes": 10 * GIB}
    run_card = {
        "memory": {
            **memory,
            "static_bytes": GIB,
            "breakdown": {"parameters": GIB // 4, "gradients": GIB // 4, "optimizer": GIB // 2},
        },
        "activation_checkpointing": {"segments": []},
    }
    text = after_out_of_memory(config, run_card)
    assert text.startswith("Memory ran out, led by activations (activations 8.00 GiB")
    assert "the cheapest first" in text
    assert text.count("time a step") == 3
    tight = replace_device(config, memory_bytes=(1 << 20) + 1, reserve_bytes=1 << 20)
    assert "alone is predicted to fit" in after_out_of_memory(tight, run_card)


@pytest.mark.parametrize(
    ("setting", "allowed"),
    [
        ("plan.num_classes=0", "1 or more"),
        ("plan.num_classes=-3", "1 or more"),
        ("plan.num_classes=abc", "1 or more"),
        ("data.image_size=512", "data.image_size=512: give a list of two numbers"),
        ("data.image_size=[0,64]", "such as [512,512]"),
        ("data.image_size=[64,64,3]", "give a list of two numbers"),
        ("batch.per_device=0", "1 or more"),
        ("batch.effective=0", "1 or more"),
        ("activation_checkpointing.budget=.", "such as 24GiB"),
    ],
)
def test_mistakes_in_what_is_planned(tmp_path, monkeypatch, capsys, setting, allowed):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert main(["plan", *TINY, setting]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert setting.replace(",", ", ") in said
    assert allowed in said


def first_step_failed(peak, segments=()):
    """The card of a run that ran out of memory before anything static was counted."""
    memory = {"peak_bytes": peak, "peak_source": "cuda_allocator", "reserved_bytes": peak}
    parts = [{"name": name, "policy": str(policy)} for name, policy in dict(segments).items()]
    return {
        "memory": {**memory, "static_bytes": None, "breakdown": None},
        "activation_checkpointing": {"segments": parts},
    }


@pytest.mark.parametrize(("optimizer", "leader"), [("adamw", "optimizer state"), ("sgd", "parameters")])
def test_who_led_in_the_first_step(monkeypatch, optimizer, leader):
    monkeypatch.setattr("seg4k.training.out_of_memory.MODES", ())
    overrides = (*DEEP, f"optimizer={optimizer}", "model.head.stride=2")
    static = traced(*overrides).static_bytes
    said = after_out_of_memory(configuration(*TINY, *overrides), first_step_failed(static))
    assert said.startswith(f"Memory ran out, led by {leader} (")


def test_only_what_needs_less_is_recommended():
    """A run that was predicted to fit ran out of memory: what needs more memory is no help."""
    config = configuration(*TINY, "data.image_size=[256,256]", "activation_checkpointing=stage")
    names = list(build_step(config, 5, 3, 255).model.segments())
    peak = traced("data.image_size=[256,256]", plan=make_plan("stage", names)).peak_bytes
    said = after_out_of_memory(config, first_step_failed(peak, make_plan("stage", names)))
    offered = [float(size) for size in re.findall(r"=\w+: ([\d.]+) MiB", said)]
    assert offered
    assert max(offered) < 0.96 * peak / 2**20


def replace_device(config, **figures):
    return {**config, "device": {**config["device"], **figures}}


def test_from_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    words = ["plan", *TINY, "strategy=fsdp", "devices=8", "hydra.run.dir=out"]
    assert main(words) == 0
    first = capsys.readouterr().out
    assert "gathered" in first or "parameters" in first
    report = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert report["feasible"]
    assert (tmp_path / "out" / "memory.png").stat().st_size > 10_000
    # The second time it is read, and nothing is traced.
    monkeypatch.setattr("seg4k.training.plan_answer.answer", None)
    assert main(words) == 0
    assert capsys.readouterr().out == first
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tight = [
        "plan",
        *TINY,
        "activation_checkpointing=auto",
        "activation_checkpointing.budget=1KiB",
        "hydra.run.dir=tight",
    ]
    assert main(tight) == 3
    assert "The smallest budget that does" in capsys.readouterr().err
    assert json.loads((tmp_path / "tight" / "plan.json").read_text())["feasible"] is False
