"""The claim of the project, as a matrix: under any plan a run leaves the same bits behind."""

import copy
import itertools

import pytest

from seg4k.activation_checkpointing import Plan, apply_activation_checkpointing, make_plan

PRECISIONS = ("fp32", "bf16", "fp16")
MODES = ("stage", "block", "blocks_by_two", "layer", "encoder", "decoder", "selective", "offload", "nested")
NORMS = ("batch", "group")
DROPOUTS = (0.0, 0.3)  # and stochastic depth
FROZEN = (False, True)
ACCUMULATE = (1, 3)


def settings() -> list:
    """All 48, for nine plans each; by default twelve, in which every pair of choices occurs."""
    default = set()
    for norm, dropout in itertools.product((0, 1), repeat=2):
        either = norm ^ dropout
        default |= {
            (0, norm, dropout, either, 1 - dropout),
            (1, norm, dropout, norm, either),
            (2, norm, dropout, dropout, 1 - norm),
        }
    options = (PRECISIONS, NORMS, DROPOUTS, FROZEN, ACCUMULATE)
    return [
        pytest.param(
            *(choices[index] for choices, index in zip(options, indices, strict=True)),
            marks=[] if indices in default else [pytest.mark.slow],
        )
        for indices in itertools.product(*(range(len(choices)) for choices in options))
    ]


def test_every_pair_of_choices_is_in_the_default_settings():
    default = [setting.values for setting in settings() if not setting.marks]
    assert len(default) == 12
    for one, other in itertools.combinations(range(5), 2):
        options = (PRECISIONS, NORMS, DROPOUTS, FROZEN, ACCUMULATE)
        assert {(v[one], v[other]) for v in default} == set(itertools.product(options[one], options[other]))


def plan_of(mode: str, names: list[str]) -> Plan:
    if mode == "blocks_by_two":
        return make_plan("block", names, blocks_per_segment=2)
    if mode == "offload":
        return Plan(dict.fromkeys(make_plan("stage", names), "offload"))
    if mode == "nested":
        policies = {
            "encoder.stage*": "recompute",
            "encoder.stage*.block*": "selective",
            "neck.*": "offload",
            "decoder.block*": "recompute",
            "decoder.block*.*": "recompute",
            "head": "recompute",
        }
        return make_plan("plan", names, segments=policies)
    return make_plan(mode, names)


@pytest.mark.parametrize(("precision", "norm", "dropout", "frozen", "accumulate"), settings())
def test_every_plan_leaves_the_same_bits(precision, norm, dropout, frozen, accumulate, toy, train):
    """Losses, gradients, buffers, weights and the random state after five optimizer steps."""
    model = toy(norm=norm, dropout=dropout, frozen=frozen)
    options = {"steps": 5, "precision": precision, "accumulate": accumulate}
    plain = train(copy.deepcopy(model), **options)
    assert any((a != b).any() for a, b in zip(plain.weights.values(), model.parameters(), strict=True))
    for mode in MODES:
        under_plan = copy.deepcopy(model)
        apply_activation_checkpointing(under_plan, plan_of(mode, list(model.segments())), audit="off")
        differences = train(under_plan, **options).differences(plain)
        assert differences == [], mode
    if norm == "batch":
        assert under_plan.decoder[0].conv1.norm.num_batches_tracked == 5 * accumulate


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("audit", ["first_step", "always"])
def test_the_audit_changes_nothing(audit, norm, toy, train):
    model = toy(dropout=0.3, norm=norm)
    plain = train(copy.deepcopy(model), steps=2, precision="bf16")
    for mode in MODES:
        under_plan = copy.deepcopy(model)
        apply_activation_checkpointing(under_plan, plan_of(mode, list(model.segments())), audit=audit)
        assert train(under_plan, steps=2, precision="bf16").differences(plain) == [], mode


def test_the_comparison_sees_one_bit(toy, train):
    one, other = train(toy()), train(toy())
    assert one.differences(other) == []
    gradient = one.gradients["head.bias"]
    gradient[0] = gradient[0].nextafter(gradient[1])
    one.buffers["decoder.0.conv1.norm.num_batches_tracked"] += 1
    assert one.differences(other) == [
        "gradients head.bias",
        "buffers decoder.0.conv1.norm.num_batches_tracked",
    ]
