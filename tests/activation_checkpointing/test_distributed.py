"""What is put on top of recomputed segments works as on the plain model; one process, no network."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from seg4k.activation_checkpointing import (
    apply_activation_checkpointing,
    make_plan,
    remove_activation_checkpointing,
)
from seg4k.activation_checkpointing.segment_call import Observer, observed_by
from seg4k.errors import UserError

PLANS = [("stage", {}), ("selective", {}), ("block", {"blocks_per_segment": 2})]


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def gradients(model, wrapped):
    torch.manual_seed(1)
    loss = wrapped(torch.rand(2, 3, 16, 16)).square().mean()
    loss.backward()
    found = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        found[name] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return [loss.detach(), *(found[name] for name in sorted(found))]


class Recomputed(Observer):
    def __init__(self):
        self.names = []

    def enter(self, segment, recompute):
        if recompute:
            self.names.append(segment)


@pytest.mark.parametrize(("mode", "options"), PLANS)
def test_ddp(mode, options, toy, group):
    plain = toy(dropout=0.2)
    expected = gradients(plain, plain)
    model = toy(dropout=0.2)
    plan = make_plan(mode, list(model.segments()), **options)
    apply_activation_checkpointing(model, plan)
    observer = Recomputed()
    with observed_by(observer):
        found = gradients(model, DistributedDataParallel(model))
    assert all(map(torch.equal, found, expected))
    assert sorted(observer.names) == sorted(plan)


@pytest.mark.parametrize(("mode", "options"), PLANS)
@pytest.mark.parametrize("unit", ["stage", "block"])
@pytest.mark.filterwarnings("ignore:.*reshard_after_forward")
def test_fsdp2(mode, options, unit, toy, group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    plain = toy(dropout=0.2)
    expected = gradients(plain, plain)
    model = toy(dropout=0.2)
    plan = make_plan(mode, list(model.segments()), **options)
    apply_activation_checkpointing(model, plan)
    names = list(model.state_dict())
    mesh = init_device_mesh("cpu", (1,))
    for stage in model.stages:
        for module in stage if unit == "block" else (stage,):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert list(model.state_dict()) == names
    observer = Recomputed()
    with observed_by(observer):
        found = gradients(model, model)
    assert all(map(torch.equal, found, expected))
    assert sorted(observer.names) == sorted(plan)

    with pytest.raises(UserError, match="Apply activation checkpointing first"):
        apply_activation_checkpointing(model, make_plan(unit, list(model.segments())))
    remove_activation_checkpointing(model)
    with observed_by(observer):
        observer.names.clear()
        gradients(model, model)
    assert observer.names == []
