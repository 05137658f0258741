import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from seg4k.activation_checkpointing import Plan, apply_activation_checkpointing, make_plan
from seg4k.activation_checkpointing.measure import measure_segments, predict_recompute_flops

aten = torch.ops.aten
CPU_ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda g, q, k, v, *_, **__: sdpa_backward_flop_count(g, q, k, v)
    ),
}


def loss_fn(logits):
    return logits.square().mean()


def measure(model, plan=None):
    return measure_segments(model, torch.rand(2, 3, 16, 16), loss_fn=loss_fn, plan=plan)


def plans(names):
    yield from (make_plan(m, names) for m in ("stage", "block", "layer", "encoder", "decoder", "selective"))
    yield make_plan("block", names, blocks_per_segment=2)
    yield Plan(dict.fromkeys(make_plan("stage", names), "offload"))
    yield make_plan(
        "plan",
        names,
        segments={
            "encoder.stage*": "recompute",
            "encoder.stage*.block*": "selective",
            "decoder.block*": "recompute",
            "decoder.block*.*": "recompute",
            "head": "recompute",
        },
    )
    yield make_plan(
        "plan",
        names,
        segments={
            "encoder.stage*": "selective",
            "encoder.stage0.block0-1": "recompute",
            "encoder.stage1.block*.attn": "selective",
            "encoder.stage1.block1.mlp": "recompute",
        },
    )


@pytest.mark.parametrize("options", [{}, {"norm": "group", "dropout": 0.2}, {"frozen": True}])
def test_operations_are_those_that_the_plan_predicts_to_the_last(options, toy):
    model = toy(**options)
    names = list(model.segments())
    baseline = measure(model)
    assert baseline.recompute_flops == 0
    for plan in plans(names):
        measured = measure(model, plan)
        predicted = predict_recompute_flops(baseline, plan)
        assert {n: measured.segments[n].recompute_flops for n in plan.recomputed()} == predicted
        assert measured.forward_flops == baseline.forward_flops
        assert measured.backward_flops == baseline.backward_flops + sum(predicted.values())


def test_something_is_really_recomputed(toy):
    """Fails where checkpointing silently does nothing, which every other comparison would pass."""
    model = toy()
    baseline = measure(model)
    for plan in plans(list(model.segments())):
        measured = measure(model, plan)
        assert [measured.segments[name].recomputations for name in plan.recomputed()] == [1] * len(plan)
        assert measured.recompute_flops > 0
        assert measured.saved_bytes < baseline.saved_bytes


def test_totals_are_those_of_torchs_counter(toy):
    model = toy()
    names = list(model.segments())
    for plan in (Plan(), make_plan("stage", names), make_plan("selective", names)):
        measured = measure(model, plan)
        apply_activation_checkpointing(model, plan, audit="off")
        with FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as counter:
            loss = loss_fn(model(torch.rand(2, 3, 16, 16)))
            forward = counter.get_total_flops()
            loss.backward()
        assert measured.forward_flops == forward
        assert measured.backward_flops == counter.get_total_flops() - forward


def test_forward_operations_by_hand(toy):
    model = toy()
    tokens, dim = 2 * 16, model.dim
    mlp = 2 * 2 * tokens * dim * 2 * dim
    attention = 2 * tokens * dim * 4 * dim + 2 * 2 * tokens * 16 * dim
    segments = measure(model).segments
    assert segments["encoder.stage0.block0.mlp"].forward_flops == mlp
    assert segments["encoder.stage0.block0.attn"].forward_flops == attention
    assert segments["encoder.stage0"].forward_flops == 2 * (mlp + attention)
    # Recomputing a whole block ends before its last product, whose result nothing needs.
    whole = measure(model, Plan({"encoder.stage0.block0": "recompute"})).segments["encoder.stage0.block0"]
    assert whole.recompute_flops == mlp // 2 + attention


def test_saved_bytes_by_hand():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, x):
            return self.b(torch.tanh(self.a(x * 1.0)))

        def segments(self):
            return {"a": self.a, "b": self.b}

    measured = measure_segments(Model(), torch.randn(3, 4), loss_fn=torch.sum)
    assert measured.segments["a"].saved_bytes == 3 * 4 * 4  # its input; parameters do not count
    assert measured.segments["b"].saved_bytes == 0  # its input was put aside by tanh before
    assert measured.saved_bytes == 2 * 3 * 4 * 4


def test_memory_falls_in_order_and_shares_add_up(toy):
    model = toy()
    names = list(model.segments())
    baseline = measure(model)
    none, selective, stage = (
        measure(model, make_plan(mode, names)).saved_bytes for mode in ("none", "selective", "stage")
    )
    assert none == baseline.saved_bytes
    assert none > selective > stage
    saved = {name: segment.saved_bytes for name, segment in baseline.segments.items()}
    blocks = sum(saved[f"encoder.stage0.block{i}"] for i in range(2))
    assert saved["encoder.stage0"] == blocks
    table = make_plan("stage", names).table(saved)
    shares = [float(line.split()[-1].rstrip("%")) for line in table.splitlines()[1:]]
    assert 90 < sum(shares) <= 100.5  # the rest lies in the patch embedding and the head


def test_measuring_leaves_the_model_alone(toy):
    model = toy(dropout=0.3)
    plan = make_plan("encoder", list(model.segments()))
    apply_activation_checkpointing(model, plan)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    state = torch.get_rng_state()
    assert measure(model).recompute_flops == 0
    assert measure(model, make_plan("stage", list(model.segments()))).recompute_flops > 0
    torch.manual_seed(3)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
