"""An exported model is the plain one, whatever plan is on it."""

import copy
import warnings

import pytest
import torch

from seg4k.activation_checkpointing import Plan, apply_activation_checkpointing, make_plan

PLANS = {
    "stage": {"encoder.stage*": "recompute", "neck.*": "recompute", "decoder.block*": "recompute"},
    "selective": {"encoder.stage*": "selective", "decoder.block*": "recompute"},
    "nested, with a run and offload": {
        "encoder.stage0": "offload",
        "encoder.stage0.block0-1": "recompute",
        "encoder.stage1.block*.mlp": "recompute",
        "decoder.block*": "offload",
        "decoder.block*.*": "recompute",
        "head": "recompute",
    },
}
SUSPECT = ("checkpoint", "recompute", "wrap", "seg4k", "detach", "saved", "alias", "rng")


@pytest.fixture(params=PLANS)
def models(request, toy):
    """The plain model and the same under a plan, in eval mode, after a step of training under the plan."""
    model = toy()
    apply_activation_checkpointing(
        model, make_plan("plan", list(model.segments()), segments=PLANS[request.param])
    )
    model(torch.rand(2, 3, 16, 16)).sum().backward()
    plain = copy.deepcopy(model)
    apply_activation_checkpointing(plain, Plan())
    for m in (model, plain):
        m.eval()
    return plain, model


def nodes(program):
    """Operators with the modules they ran in; in-place ones as the out-of-place ones that replace them."""
    found = []
    for node in program.graph.nodes:
        modules = list(node.meta.get("nn_module_stack", {}).values())
        found.append((node.op, str(node.target).replace("relu_.", "relu."), modules))
    return found


@pytest.mark.parametrize(("strict", "training"), [(False, False), (False, True), (True, True)])
def test_torch_export(models, strict, training):
    image = torch.rand(2, 3, 16, 16)
    plain, exported = (torch.export.export(m.train(training), (image,), strict=strict) for m in models)
    assert nodes(exported) == nodes(plain)
    assert not any(word in str(exported.graph).lower() for word in SUSPECT)
    if not training:
        assert torch.equal(exported.module()(image), models[0](image))


@pytest.mark.parametrize("models", ["nested, with a run and offload"], indirect=True)
def test_onnx(models, tmp_path):
    onnx = pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    image = torch.rand(2, 3, 16, 16)
    graphs = []
    for name, model in zip(("plain", "planned"), models, strict=True):
        path = tmp_path / f"{name}.onnx"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the exporter warns of its own inner workings
            torch.onnx.export(model, (image,), path, dynamo=True, verbose=False)
        graph = onnx.load(path).graph
        assert not any(word in node.name.lower() for node in graph.node for word in SUSPECT)
        graphs.append([(node.op_type, node.name) for node in graph.node])
        (logits,) = runtime.InferenceSession(path).run(None, {graph.input[0].name: image.numpy()})
        with torch.no_grad():
            torch.testing.assert_close(torch.from_numpy(logits), model(image), rtol=1e-4, atol=1e-5)
    assert graphs[0] == graphs[1]


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace", "ignore::torch.jit.TracerWarning")
def test_jit_trace(models):
    image = torch.rand(2, 3, 16, 16)
    plain, traced = (torch.jit.trace(m.train(), image, check_trace=False) for m in models)
    kinds = [[n.kind().rstrip("_") for n in graph.inlined_graph.nodes()] for graph in (plain, traced)]
    assert kinds[0] == kinds[1]
