"""Loss and gradients of one optimizer step on two processes, against one process with the whole batch."""

import itertools
import json

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.nn.parallel import DistributedDataParallel

from seg4k.activation_checkpointing import apply_activation_checkpointing, make_plan
from seg4k.data.classes import ClassTable
from seg4k.losses.build import build_loss
from seg4k.models.vit_unet import build_model
from seg4k.training.agreement import decided_by_the_first, of_every_process
from seg4k.training.global_batch import finish_gradients
from seg4k.training.module import SegmentationModule
from seg4k.training.sharding import shard
from tests.helpers import CLASSES, configuration
from tests.processes import leave_at_once

MODES = ("none", "stage", "block", "layer", "selective", "encoder", "decoder")
SIZE, IMAGES = (32, 48), 4
# (strategy, mode, accumulation, strips, options of DDP)
DDP = [("ddp", mode, *rest, ()) for mode, *rest in itertools.product(MODES, (1, 2), (1, 4))]
OPTIONS = [
    ("ddp", mode, 1, strips, option)
    for mode, strips in (("none", 1), ("stage", 4), ("selective", 4))
    for option in (("find_unused_parameters",), ("static_graph",))
]
FSDP = [("fsdp", mode, *rest, ()) for mode, *rest in (*itertools.product(MODES, (1,), (1,)), ("stage", 2, 4))]
ALL = [*DDP, *OPTIONS, *FSDP]
# Every mode once, in one shape or another.
FEW = [
    *(("ddp", mode, 1, 1, ()) for mode in ("none", "selective")),
    *(("ddp", mode, 2, 4, ()) for mode in ("none", "stage", "block", "layer", "encoder", "decoder")),
    *(("fsdp", mode, 1, 1, ()) for mode in ("none", "stage")),
    *OPTIONS[2:4],
]


class Trained(SegmentationModule):
    """The module as DDP calls it in training."""

    def forward(self, batch):
        return self.training_step(batch, 0)


def module_of(mode, strips):
    torch.manual_seed(0)
    config = configuration("experiment=smoke", "model.decoder.norm=group")
    model = build_model(config["model"], num_classes=3, image_size=SIZE).double().train()
    apply_activation_checkpointing(model, make_plan(mode, list(model.segments())))
    classes = ClassTable.from_dict(CLASSES, "test")
    loss = build_loss(config["loss"], 3, classes.ignore_index).double()
    options = {"optimizer": config["optimizer"], "schedule": config["schedule"], "description": {}}
    return Trained(model, loss, classes, strips=(strips, 1), **options)


def batch():
    generator = torch.Generator().manual_seed(0)
    image = torch.randint(0, 256, (IMAGES, 3, *SIZE), dtype=torch.uint8, generator=generator)
    mask = torch.randint(0, 3, (IMAGES, *SIZE), generator=generator)
    for index, ignored in enumerate((0, 31, 7, 32)):  # the last image has no valid pixel
        mask[index, :ignored] = 255
    return image, mask


def step(case, rank, world):
    """Loss of the global batch and whole gradients by name, after one optimizer step's backward passes."""
    strategy, mode, accumulate, strips, options = case
    module = module_of(mode, strips)
    called = module
    if strategy == "ddp":
        called = DistributedDataParallel(module, gradient_as_bucket_view=True, **dict.fromkeys(options, True))
    elif strategy == "fsdp":
        mesh = dist.device_mesh.init_device_mesh("cpu", (world,))
        shard(module.model, mesh)
    image, mask = (tensor[rank::world] for tensor in batch())
    parts = list(zip(image.chunk(accumulate), mask.chunk(accumulate), strict=True))
    for _ in range(2 if options else 1):  # a static graph is learned in the first step
        module.zero_grad()
        for number, (images, masks) in enumerate(parts):
            called.require_backward_grad_sync = number == len(parts) - 1
            (called({"image": images, "mask": masks}) / accumulate).backward()
        totals = module.global_batch.close()
        finish_gradients(module.parameters(), totals.factor, 0.0)
    gradients = {name: parameter.grad for name, parameter in module.model.named_parameters()}
    whole = {name: one.full_tensor() if strategy == "fsdp" else one for name, one in gradients.items()}
    return totals.loss, {name: one.clone() for name, one in whole.items()}


def job(rank, folder, cases):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    found = {case: step(case, rank, 2) for case in cases}
    torch.save(found, folder / f"{rank}.pt")
    (folder / f"{rank}.json").write_text(json.dumps(agreed(rank)))
    dist.barrier()
    leave_at_once()


def agreed(rank):
    """What the processes tell each other."""

    def decide():
        assert rank == 0
        return {"plan": {"a": "recompute"}}

    def fail():
        raise RuntimeError("does not fit")

    try:
        decided_by_the_first(fail, connected=True)
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    return [decided_by_the_first(decide, connected=True), of_every_process(rank, connected=True), failure]


@pytest.fixture(
    scope="module",
    params=[pytest.param(FEW, id="few"), pytest.param(ALL, id="all", marks=pytest.mark.slow)],
)
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    multiprocessing.spawn(job, (folder, request.param), nprocs=2)
    return folder


@pytest.fixture(scope="module")
def found(folder):
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in (0, 1)]


@pytest.fixture(scope="module")
def alone():
    return step(("single", "none", 1, 1, ()), 0, 1)


def test_processes_agree(folder):
    first, second = (json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1))
    decided = [{"plan": {"a": "recompute"}}, [0, 1]]
    assert first == [*decided, "RuntimeError: does not fit"]
    assert second == [*decided, "UserError: the first process ended with RuntimeError: does not fit"]


def test_both_processes_hold_the_same_gradients(found):
    for case in found[0]:
        (loss, first), (other_loss, second) = (ranks[case] for ranks in found)
        assert loss == other_loss, case
        assert all(torch.equal(first[name], second[name]) for name in first), case


def test_they_are_those_of_the_whole_batch_in_one_piece(found, alone):
    largest = max(float(one.abs().max()) for one in alone[1].values())
    table = {}
    for case, (loss, gradients) in found[0].items():
        assert gradients.keys() == alone[1].keys()
        assert loss == pytest.approx(alone[0], rel=1e-12), case
        table[case] = max(float((gradients[name] - one).abs().max()) for name, one in alone[1].items())
    for strategy in ("ddp", "fsdp"):
        worst = max(difference for case, difference in table.items() if case[0] == strategy)
        print(f"{strategy}: gradients up to {largest:.1e}, largest difference {worst:.1e}")
    assert max(table.values()) < 1e-12 * largest


def test_no_mode_changes_a_bit(found):
    for case, (loss, gradients) in found[0].items():
        strategy, _, *shape, options = case
        if not options and (strategy, "none", *shape, ()) in found[0]:
            plain_loss, plain = found[0][strategy, "none", *shape, ()]
            assert loss == plain_loss
            assert all(torch.equal(gradients[name], plain[name]) for name in plain), case


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("accumulate", [1, 4])
def test_strips_in_one_process(mode, accumulate, alone):
    loss, gradients = step(("single", mode, accumulate, 4, ()), 0, 1)
    assert loss == pytest.approx(alone[0], rel=1e-12)
    for name, one in alone[1].items():
        torch.testing.assert_close(gradients[name], one, rtol=1e-9, atol=1e-13, msg=name)
