import copy
import gc
import io
import pickle

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from seg4k.activation_checkpointing import (
    ActivationCheckpointingError,
    Plan,
    activation_checkpointing,
    applied_plan,
    apply_activation_checkpointing,
    make_plan,
    remove_activation_checkpointing,
)
from seg4k.activation_checkpointing.segment_call import Observer, observed_by
from seg4k.errors import UserError


def plan_of(mode, model, **options):
    return make_plan(mode, list(model.segments()), **options)


def image():
    return torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))


class Recomputations(Observer):
    def __init__(self):
        self.names = []

    def enter(self, segment, recompute):
        if recompute:
            self.names.append(segment)


def recomputed(function):
    observer = Recomputations()
    with observed_by(observer):
        function()
    return observer.names


def step(model):
    return recomputed(lambda: model(image()).square().mean().backward())


@pytest.mark.parametrize("mode", ["stage", "block", "layer", "encoder", "decoder", "selective"])
def test_every_segment_of_the_plan_is_recomputed_once_in_a_step(mode, toy):
    model = toy()
    plan = plan_of(mode, model)
    apply_activation_checkpointing(model, plan)
    assert len(plan) > 0
    for _ in range(2):
        assert sorted(step(model)) == sorted(plan)


def test_names_of_parameters_buffers_and_weights_never_change(toy):
    model = toy()
    before = {
        "state": list(model.state_dict()),
        "parameters": [n for n, _ in model.named_parameters()],
        "buffers": [n for n, _ in model.named_buffers()],
        "modules": [n for n, _ in model.named_modules()],
        "print": repr(model).replace("inplace=True", ""),
    }
    for mode in ("stage", "layer", "selective"):
        apply_activation_checkpointing(model, plan_of(mode, model))
        assert before == {
            "state": list(model.state_dict()),
            "parameters": [n for n, _ in model.named_parameters()],
            "buffers": [n for n, _ in model.named_buffers()],
            "modules": [n for n, _ in model.named_modules()],
            "print": repr(model).replace("inplace=True", ""),
        }


def test_training_resumes_under_another_plan(toy, train):
    model, plain = toy(), toy()
    apply_activation_checkpointing(model, plan_of("block", model))
    train(model, steps=2)
    train(plain, steps=2)
    resumed = toy()
    apply_activation_checkpointing(resumed, plan_of("selective", resumed))
    resumed.load_state_dict(model.state_dict())
    assert train(resumed, steps=2).differences(train(plain, steps=2)) == []


def test_applying_twice_equals_once_and_another_plan_takes_the_place(toy):
    model = toy()
    apply_activation_checkpointing(model, plan_of("stage", model))
    classes = [type(module) for module in model.modules()]
    first = apply_activation_checkpointing(model, plan_of("stage", model))
    assert classes == [type(module) for module in model.modules()]
    assert applied_plan(model) == first
    assert sorted(step(model)) == sorted(plan_of("stage", model))
    apply_activation_checkpointing(model, plan_of("encoder", model))
    assert sorted(step(model)) == ["encoder.stage0", "encoder.stage1"]


@pytest.mark.parametrize("options", [{}, {"blocks_per_segment": 2}])
def test_removing_restores_the_plain_model(toy, options):
    model, plain = toy(), toy()
    apply_activation_checkpointing(model, plan_of("block", model, **options))
    remove_activation_checkpointing(model)
    for module, other in zip(model.modules(), plain.modules(), strict=True):
        assert type(module) is type(other)
        assert module.__dict__.keys() == other.__dict__.keys()
        assert getattr(module, "inplace", None) == getattr(other, "inplace", None)
    assert applied_plan(model) is None
    assert step(model) == []
    remove_activation_checkpointing(model)


def test_a_block_of_code_with_a_plan_puts_back_the_one_before(toy):
    model = toy()
    with activation_checkpointing(model, plan_of("stage", model)):
        with activation_checkpointing(model, plan_of("encoder", model)):
            assert len(step(model)) == 2
        assert len(step(model)) == len(plan_of("stage", model))
    assert step(model) == []


def test_nothing_is_recomputed_in_evaluation_without_gradients_or_where_none_arrive(toy):
    model = toy()
    apply_activation_checkpointing(model, plan_of("stage", model))
    model.eval()
    assert step(model) == []
    model.train()
    with torch.no_grad():
        assert recomputed(lambda: model(image())) == []
    with torch.inference_mode():
        assert recomputed(lambda: model(image())) == []
    frozen = toy(frozen=True)
    apply_activation_checkpointing(frozen, plan_of("stage", frozen))
    assert not any(name.startswith("encoder") for name in step(frozen))


def test_a_frozen_stage_in_training_mode_keeps_nothing(toy):
    model = toy()
    for module in (model.patch_embed, model.stages):
        module.requires_grad_(False)
    apply_activation_checkpointing(model, plan_of("selective", model))
    saved = []
    model.stages[1].register_forward_hook(lambda *_: saved.clear())
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        model.patch_embed.register_forward_hook(lambda *_: saved.clear())
        handle = model.neck["stride4"].register_forward_pre_hook(lambda *_: saved.append("neck"))
        model(image())
    handle.remove()
    assert saved[0] == "neck"


@pytest.mark.parametrize("options", [{}, {"blocks_per_segment": 2}])
def test_copies_are_complete_and_independent(toy, options, train):
    model = toy(dropout=0.2)
    apply_activation_checkpointing(model, plan_of("block", model, **options))
    step(model)
    twin = copy.deepcopy(model)
    model.zero_grad()
    own = {id(module) for module in model.modules()}
    assert not any(id(module) in own for module in twin.modules())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # a copy that still called the original would see this
    plain = toy(dropout=0.2)
    plain.load_state_dict(twin.state_dict())
    assert sorted(step(twin)) == sorted(plan_of("block", twin, **options))
    twin.zero_grad()
    plain.load_state_dict(twin.state_dict())
    assert train(twin, steps=2).differences(train(plain, steps=2)) == []
    remove_activation_checkpointing(model)
    assert len(step(twin)) > 0


def test_a_copy_between_forward_and_backward_is_right_too(toy):
    model = toy()
    apply_activation_checkpointing(model, plan_of("block", model, blocks_per_segment=2))
    caught = []
    model.stages[0][1].register_forward_hook(lambda *_: caught.append(copy.deepcopy(model.stages[0])))
    step(model)
    stage = caught[0]
    x = torch.randn(2, 4, 8, requires_grad=True)
    with torch.no_grad():
        expected = stage(x)
    torch.testing.assert_close(stage(x), expected, rtol=0, atol=0)


class Sequential(nn.Sequential):
    """Can be found by pickle."""

    def segments(self):
        return {f"block{i}": module for i, module in enumerate(self)}


def test_pickles_recompute_like_the_model():
    torch.manual_seed(0)
    model = Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(3))).train()
    apply_activation_checkpointing(model, Plan({"block0-1": "recompute", "block2": "recompute"}))
    again = pickle.loads(pickle.dumps(model))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (again, torch.load(buffer, weights_only=False)):
        x = torch.randn(2, 4, requires_grad=True)
        assert recomputed(lambda x=x, other=other: other(x).sum().backward()) == ["block2", "block0-1"]
        remove_activation_checkpointing(other)
        assert type(other[0]) is nn.Sequential


def test_hooks_run_as_on_the_plain_model(toy):
    for options in ({}, {"blocks_per_segment": 2}):
        calls = {}
        for name in ("plain", "recomputed"):
            model = toy()
            if name == "recomputed":
                apply_activation_checkpointing(model, plan_of("block", model, **options))
            seen = calls[name] = []
            for index, block in enumerate(model.stages[0]):
                block.register_forward_pre_hook(
                    lambda _, args, i=index, s=seen: s.append((i, args[0].detach()))
                )
                block.register_forward_hook(lambda _, args, out, i=index, s=seen: s.append((i, out.detach())))
            model(image())
        assert [i for i, _ in calls["plain"]] == [i for i, _ in calls["recomputed"]]
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(*calls.values(), strict=True))


def test_a_step_leaves_no_cycles_behind(toy):
    model = toy()
    plan = plan_of(
        "plan", model, segments={"encoder.stage*": "selective", "neck.*": "offload", "decoder.*": "recompute"}
    )
    apply_activation_checkpointing(model, plan)
    inputs = []
    model.stages[1].register_forward_pre_hook(
        lambda _, args: inputs.append(StorageWeakRef(args[0].untyped_storage()))
    )
    model.decoder[1].register_forward_pre_hook(
        lambda _, args: inputs.append(StorageWeakRef(args[0].untyped_storage()))
    )
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            loss = model(image()).sum()
            assert not any(memory.expired() for memory in inputs)
            loss.backward()
            del loss
            assert all(memory.expired() for memory in inputs)
            inputs.clear()
        model(image())  # never differentiated
        assert all(memory.expired() for memory in inputs)
    finally:
        gc.enable()


@pytest.mark.parametrize("audit", ["off", "always"])
@pytest.mark.parametrize("mode", ["stage", "selective"])
def test_what_is_inside_a_segment_is_freed_while_it_runs(mode, audit, toy):
    model = toy(depth=4)
    apply_activation_checkpointing(model, plan_of(mode, model), audit=audit)
    inside, alive = [], []

    def watch(module, args):
        alive.append(sum(not memory.expired() for memory in inside))
        inside.append(StorageWeakRef(args[0].untyped_storage()))

    for block in list(model.stages[0])[1:]:
        block.register_forward_pre_hook(watch)
    loss = model(image()).sum()
    assert max(alive) <= 1  # the input of the block before, which still has its caller
    assert all(memory.expired() for memory in inside[:-1])
    loss.backward()


def test_backward_twice_and_second_derivatives(toy):
    results = []
    for mode in ("none", "stage"):
        model = toy()
        apply_activation_checkpointing(model, plan_of(mode, model))
        x = image().requires_grad_()
        loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        with sdpa_kernel(SDPBackend.MATH):  # the only one that can be differentiated twice
            (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
            gradient.square().sum().backward()
        results.append([x.grad, *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *results))


def test_several_forward_passes_before_backward(toy, train):
    results = []
    for mode in ("none", "block"):
        model = toy(dropout=0.3)
        apply_activation_checkpointing(model, plan_of(mode, model))
        torch.manual_seed(3)
        losses = [model(image() * scale).square().mean() for scale in (1, 2)]
        torch.stack(losses).sum().backward()
        results.append(
            [*losses, *(p.grad for p in model.parameters()), *model.buffers(), torch.get_rng_state()]
        )
    assert all(map(torch.equal, *results))


def test_mistakes_are_named(toy):
    model = toy()
    with pytest.raises(UserError, match=r"has no method segments\(\)"):
        apply_activation_checkpointing(nn.Linear(2, 2), Plan())
    with pytest.raises(UserError, match=r"Did you mean encoder\.stage1 or encoder\.stage0"):
        apply_activation_checkpointing(model, Plan({"encoder.stage": "recompute"}))
    with pytest.raises(UserError, match="not a segment"):
        apply_activation_checkpointing(model, Plan({"encoder.stage0.block1-2": "recompute"}))
    with pytest.raises(UserError, match="choose one of first_step, always, off"):
        apply_activation_checkpointing(model, Plan(), audit="sometimes")
    model.stages[0].forward = model.stages[0].forward
    with pytest.raises(UserError, match=r"forward of segment encoder\.stage0 was replaced"):
        apply_activation_checkpointing(model, Plan({"encoder.stage0": "recompute"}))

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(2, 2)

        def segments(self):
            return {"one": self.one, "two": self.one}

    with pytest.raises(UserError, match="one and two are one module"):
        apply_activation_checkpointing(Twice(), Plan({"one": "recompute", "two": "recompute"}))


def test_a_refused_plan_leaves_the_one_before_in_place(toy):
    model = toy()
    apply_activation_checkpointing(model, plan_of("encoder", model))
    with pytest.raises(UserError):
        apply_activation_checkpointing(model, Plan({"nothing": "recompute"}))
    assert len(step(model)) == 2


@pytest.mark.parametrize(
    "between",
    [
        lambda x: x * 1.0,
        lambda x: x.view_as(x),
        lambda x: x.clone(),
    ],
)
def test_a_run_refuses_a_model_that_does_something_between_its_blocks(toy, between):
    model = toy()

    class Stage(nn.Sequential):
        def forward(self, x):
            return self[1](between(self[0](x)))

    model.stages[0].__class__ = Stage
    apply_activation_checkpointing(model, plan_of("block", model, blocks_per_segment=2))
    with pytest.raises(
        ActivationCheckpointingError, match=r"segment encoder\.stage0\.block0-1.*one after the other"
    ):
        model(image())


def test_a_run_takes_further_arguments_if_they_are_the_same():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, scale, *, shift=None):
            return self.linear(x) * scale + (0 if shift is None else shift)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Scale() for _ in range(3))

        def forward(self, x, scales, shift):
            for block, scale in zip(self.blocks, scales, strict=True):
                x = block(x, scale, shift=shift)
            return x

        def segments(self):
            return {f"block{i}": block for i, block in enumerate(self.blocks)}

    torch.manual_seed(0)
    model = Model().train()
    x, scale, shift = torch.randn(2, 4), torch.randn(4, requires_grad=True), torch.randn(4)
    expected = torch.autograd.grad(model(x, [scale] * 3, shift).sum(), [scale, *model.parameters()])
    apply_activation_checkpointing(model, Plan({"block0-2": "recompute"}))
    loss = model(x, [scale] * 3, shift).sum()
    assert all(map(torch.equal, torch.autograd.grad(loss, [scale, *model.parameters()]), expected))
    with pytest.raises(ActivationCheckpointingError, match="same further arguments"):
        model(x, [scale, scale.clone(), scale], shift)
    model(x, [scale] * 3, shift)  # the failed call has left nothing behind


def test_segments_nest(toy, train):
    plan = {
        "encoder.stage*": "recompute",
        "encoder.stage*.block*": "selective",
        "encoder.stage0.block0.mlp": "recompute",
        "decoder.block*": "offload",
        "decoder.block*.*": "recompute",
        "neck.*": "offload",
        "head": "recompute",
    }
    model, plain = toy(dropout=0.2), toy(dropout=0.2)
    apply_activation_checkpointing(model, plan_of("plan", model, segments=plan), audit="always")
    assert train(model, steps=3).differences(train(plain, steps=3)) == []
    assert model.decoder[0].conv1.norm.num_batches_tracked == 3


def test_running_statistics_that_turned_infinite_are_put_back(toy):
    model = toy()
    apply_activation_checkpointing(model, plan_of("stage", model), audit="off")
    norm = model.decoder[0].conv1.norm
    loss = model(image()).sum()
    norm.running_mean.fill_(float("inf"))
    norm.running_var.fill_(float("nan"))
    loss.backward()
    assert norm.running_mean.isinf().all()
    assert norm.running_var.isnan().all()
    assert norm.num_batches_tracked == 1


def test_every_norm_that_keeps_statistics_updates_once_a_step(lone):
    timm_layers = pytest.importorskip("timm.layers")
    x = torch.randn(4, 6, 5, 5, requires_grad=True)
    norms = [
        nn.BatchNorm2d(6),
        nn.BatchNorm2d(6, momentum=None),
        nn.InstanceNorm2d(6, track_running_stats=True),
        timm_layers.BatchNormAct2d(6),
        nn.BatchNorm2d(6, track_running_stats=False),
        nn.BatchNorm2d(6).eval(),
    ]

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norms = nn.Sequential(*norms)

        def segments(self):
            return {"norms": self.norms}

    torch.manual_seed(0)
    model = Model()
    plain = copy.deepcopy(model)
    apply_activation_checkpointing(model, Plan({"norms": "recompute"}), audit="always")
    for _ in range(3):
        for m in (model, plain):
            m.norms(x).square().sum().backward()
    for (name, a), b in zip(model.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(a, b), name
    assert model.norms[0].num_batches_tracked == 3


def test_save_on_cpu_and_other_hooks_around_the_model_work(toy):
    results = []
    for mode in ("none", "stage", "selective"):
        model = toy(dropout=0.1)
        apply_activation_checkpointing(model, plan_of(mode, model))
        torch.manual_seed(5)
        with torch.autograd.graph.save_on_cpu():
            loss = F.mse_loss(model(image()), torch.zeros(2, 5, 16, 16))
        loss.backward()
        results.append([loss, *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, results[0], results[1]))
    assert all(map(torch.equal, results[0], results[2]))


def test_autocast_inside_and_around_backward_and_shared_casts(toy):
    """Autocast casts a weight once and keeps the cast: recomputation may cast again, or not at all."""
    for inside in (True, False):
        results = []
        for mode in ("none", "stage", "selective"):
            model = toy(dropout=0.1)
            apply_activation_checkpointing(model, plan_of(mode, model), audit="always")
            torch.manual_seed(5)
            with torch.autocast("cpu", torch.bfloat16):
                losses = [model(image() * scale).square().mean() for scale in (1, 2)]
                if inside:
                    torch.stack(losses).sum().backward()
            if not inside:
                torch.stack(losses).sum().backward()
            results.append([*losses, *(p.grad for p in model.parameters()), *model.buffers()])
        assert all(map(torch.equal, results[0], results[1]))
        assert all(map(torch.equal, results[0], results[2]))


@pytest.mark.parametrize("mode", ["stage", "selective", "layer"])
def test_a_step_can_be_traced_on_fake_tensors(mode, toy):
    from torch._subclasses import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        operators = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.operators += func in (torch.ops.aten.convolution.default, torch.ops.aten.addmm.default)
            return func(*args, **(kwargs or {}))

    counts = []
    for chosen in ("none", mode):
        with FakeTensorMode():
            model = toy()
            apply_activation_checkpointing(model, plan_of(chosen, model), audit="always")
            with Count() as count:
                logits = model(torch.rand(2, 3, 16, 16))
                logits.sum().backward()
        assert logits.shape == (2, 5, 16, 16)
        assert all(parameter.grad is not None for parameter in model.parameters())
        counts.append(count.operators)
    assert counts[0] < counts[1]
