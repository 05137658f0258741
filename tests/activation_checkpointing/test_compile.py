"""Under torch.compile a plan gives what it gives in eager mode, or is refused."""

import copy

import pytest
import torch
from torch.nn import functional as F

from seg4k.activation_checkpointing import Plan, apply_activation_checkpointing, make_plan


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def run(model, backend=None, fullgraph=True):
    image = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    mask = torch.randint(5, (2, 16, 16), generator=torch.Generator().manual_seed(2))
    saved = []
    if backend is not None:
        model.compile(backend=backend, fullgraph=fullgraph)
    for _ in range(2):
        saved.clear()
        model.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            logits = model(image)
        size = sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in saved}.values())
        loss = F.cross_entropy(logits, mask)
        loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return loss.detach(), gradients, dict(model.named_buffers()), size


def plan_of(mode, model):
    if mode == "blocks by two":
        return make_plan("block", list(model.segments()), blocks_per_segment=2)
    return make_plan(mode, list(model.segments()))


def check(mode, backend, toy):
    model = toy()
    eager = run(copy.deepcopy(model))
    kept = run(copy.deepcopy(model), backend)
    apply_activation_checkpointing(model, plan_of(mode, model))
    torch._dynamo.reset()
    compiled = run(model, backend)
    torch.testing.assert_close(compiled[0], eager[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(compiled[1], eager[1], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(compiled[2], eager[2], rtol=1e-5, atol=1e-6)
    assert model.decoder[0].conv1.norm.num_batches_tracked == 2
    return compiled[3], kept[3]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("mode", ["stage", "selective", "blocks by two"])
def test_traced_as_one_graph_with_the_same_result(mode, toy):
    compiled, kept = check(mode, "aot_eager_decomp_partition", toy)
    assert compiled < kept


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("mode", ["stage", "selective", "blocks by two"])
def test_inductor(mode, toy):
    check(mode, "inductor", toy)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute:UserWarning")
def test_an_offloaded_segment_runs_uncompiled_or_is_refused(toy):
    model = toy()
    eager = run(copy.deepcopy(model))
    apply_activation_checkpointing(model, Plan({"encoder.stage0": "offload"}))
    refused = copy.deepcopy(model)
    compiled = run(model, "aot_eager", fullgraph=False)
    torch.testing.assert_close(compiled[1], eager[1], rtol=1e-4, atol=1e-6)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="offload_cannot_be_compiled"):
        run(refused, "aot_eager")
