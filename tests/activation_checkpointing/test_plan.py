import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seg4k.activation_checkpointing import MODES, Plan, Policy, make_plan
from seg4k.activation_checkpointing.segments import group_runs, is_inside, matching, members
from seg4k.errors import UserError

NAMES = [
    "encoder.patch_embed",
    *(
        name
        for stage in range(4)
        for name in (
            f"encoder.stage{stage}",
            *(
                f"encoder.stage{stage}.block{block}{layer}"
                for block in range(3)
                for layer in ("", ".attn", ".mlp")
            ),
        )
    ),
    "neck.stride16",
    "neck.stride8",
    "decoder.block0",
    "decoder.block0.conv1",
    "decoder.block0.conv2",
    "decoder.block1",
    "head",
]
STAGES = [f"encoder.stage{i}" for i in range(4)]
BLOCKS = [f"encoder.stage{i}.block{j}" for i in range(4) for j in range(3)]
REST = ["neck.stride16", "neck.stride8", "decoder.block0", "decoder.block1"]


def test_a_star_does_not_cross_a_dot():
    assert matching("encoder.stage*", NAMES) == STAGES
    assert matching("encoder.stage*.block*", NAMES) == BLOCKS
    assert matching("*", NAMES) == ["head"]
    assert matching("encoder.stage1.block?.mlp", NAMES) == [f"encoder.stage1.block{i}.mlp" for i in range(3)]
    assert matching("encoder+stage0", ["encoderrstage0", "encoder+stage0"]) == ["encoder+stage0"]


@pytest.mark.parametrize(
    ("mode", "names"),
    [
        ("none", []),
        ("stage", [*STAGES, *REST]),
        ("block", [*BLOCKS, *REST]),
        (
            "layer",
            [
                "encoder.patch_embed",
                *(f"{block}.{layer}" for block in BLOCKS for layer in ("attn", "mlp")),
                "neck.stride16",
                "neck.stride8",
                "decoder.block0.conv1",
                "decoder.block0.conv2",
                "decoder.block1",
            ],
        ),
        ("encoder", STAGES),
        ("decoder", REST),
        ("selective", [*STAGES, *REST]),
    ],
)
def test_modes(mode, names):
    plan = make_plan(mode, NAMES)
    assert list(plan) == names
    for name, policy in plan.items():
        selective = mode == "selective" and name.startswith("encoder")
        assert policy == ("selective" if selective else "recompute")


def test_every_mode_is_made_or_refused_with_a_reason():
    for mode in set(MODES) - {"auto", "plan"}:
        make_plan(mode, NAMES)
    with pytest.raises(UserError, match="memory planner"):
        make_plan("auto", NAMES)
    with pytest.raises(UserError, match=r"activation_checkpointing=stages: choose one of none, stage"):
        make_plan("stages", NAMES)


def test_blocks_per_segment():
    plan = make_plan("block", NAMES, blocks_per_segment=2)
    expected = [f"encoder.stage{i}.{run}" for i in range(4) for run in ("block0-1", "block2")]
    assert list(plan) == [*expected, *REST]
    assert plan.policy("encoder.stage3.block1") is Policy.RECOMPUTE
    assert list(make_plan("block", NAMES, blocks_per_segment=9))[:4] == [f"{s}.block0-2" for s in STAGES]
    with pytest.raises(UserError, match="belongs to activation_checkpointing=block, not stage"):
        make_plan("stage", NAMES, blocks_per_segment=2)
    with pytest.raises(UserError, match="give 1 or more"):
        make_plan("block", NAMES, blocks_per_segment=0)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=4), st.integers(1, 8))
def test_runs_cover_each_block_once_in_order(depths, size):
    names = [f"encoder.stage{s}.block{b}" for s, depth in enumerate(depths) for b in range(depth)]
    runs = group_runs(names, size)
    assert [member for run in runs for member in members(run)] == names
    assert all(len(members(run)) <= size for run in runs)
    assert len(runs) == sum(-(-depth // size) for depth in depths)


def test_nesting_is_by_whole_parts_of_a_name():
    assert is_inside("encoder.stage1.block0", "encoder.stage1")
    assert not is_inside("encoder.stage10", "encoder.stage1")
    assert is_inside("a.block1.mlp", "a.block0-1")
    assert not is_inside("a.block2.mlp", "a.block0-1")
    assert not is_inside("a.block1", "a.block0-1")


def test_explicit_plans_take_names_patterns_and_runs_and_the_last_word_counts():
    plan = make_plan(
        "plan",
        NAMES,
        segments={
            "head": "recompute",
            "encoder.stage*": "selective",
            "encoder.stage2": "offload",
            "encoder.stage1.block1-2": "recompute",
            "decoder.block*": "keep",
        },
    )
    assert dict(plan) == {
        "encoder.stage0": "selective",
        "encoder.stage1": "selective",
        "encoder.stage1.block1-2": "recompute",
        "encoder.stage2": "offload",
        "encoder.stage3": "selective",
        "decoder.block0": "keep",
        "decoder.block1": "keep",
        "head": "recompute",
    }
    assert list(plan)[2] == "encoder.stage1.block1-2"
    assert "decoder.block0" not in plan.recomputed()


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ({"encoder.stge1": "recompute"}, r"not a segment .* Did you mean encoder\.stage1 .*segments are:"),
        ({"encodr.*": "recompute"}, "matches no segment"),
        ({"encoder.stage1.block1-3": "recompute"}, "is not a segment"),
        ({"encoder.stage1": "recomputed"}, "choose one of keep, recompute, selective, offload"),
        ({"a.block0-1": "recompute"}, "is not a segment"),
        (
            {"encoder.stage1.block0-1": "recompute", "encoder.stage1.block1": "keep"},
            "names encoder.stage1.block1 twice",
        ),
    ],
)
def test_mistakes_in_explicit_plans_are_named(segments, message):
    with pytest.raises(UserError, match=message):
        make_plan("plan", NAMES, segments=segments)


def test_the_list_of_valid_names_is_whole():
    with pytest.raises(UserError) as error:
        make_plan("plan", NAMES, segments={"decoder.concat": "recompute"})
    assert all(name in str(error.value) for name in NAMES)


def test_a_model_without_the_segments_of_a_mode_is_refused():
    with pytest.raises(UserError, match=r"has no such segments.*It has: blocks\.0"):
        make_plan("stage", ["blocks.0", "blocks.1"])


def test_a_plan_file(tmp_path):
    path = tmp_path / "plan.json"
    plan = make_plan("selective", NAMES)
    path.write_text(plan.to_json())
    assert make_plan("plan", NAMES, path=path) == plan
    path.write_text('{"encoder.stage*": "recompute"}')
    assert make_plan("plan", NAMES, path=str(path)) == make_plan("encoder", NAMES)
    path.write_text(
        '{"schema": 1, "feasible": true, "segments": [{"name": "head", "policy": "keep", "x": 1}]}'
    )
    assert make_plan("plan", NAMES, path=path) == Plan({"head": "keep"})
    for text, message in (
        ("[", "not JSON"),
        ('{"schema": 2, "segments": []}', "schema 2"),
        ('{"segments": [1]}', "a plan is"),
        ('"stage"', "a plan is"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=message):
            make_plan("plan", NAMES, path=path)
    with pytest.raises(UserError, match="no such file"):
        make_plan("plan", NAMES, path=tmp_path / "none.json")
    for options in ({}, {"path": path, "segments": {}}):
        with pytest.raises(UserError, match="either as a file"):
            make_plan("plan", NAMES, **options)
    with pytest.raises(UserError, match="belong to activation_checkpointing=plan"):
        make_plan("stage", NAMES, path=path)


@given(st.dictionaries(st.sampled_from(NAMES), st.sampled_from(list(Policy))))
def test_plans_round_trip_and_are_values(policies):
    plan = Plan(policies)
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert hash(again) == hash(plan)
    assert list(again) == list(policies)
    assert json.loads(plan.to_json())["segments"] == plan.as_list()
    if policies:
        assert plan != Plan({**policies, next(iter(policies)): "keep", "new": "recompute"})


def test_a_plan_prints_each_share_of_all_saved_activations():
    saved = {"a": 4 * 2**20, "a.block0": 3 * 2**20, "a.block1": 2**20, "b": 12 * 2**20}
    plan = Plan({"a.block0-1": "selective", "b": "recompute", "c": "offload"})
    assert plan.table(saved).splitlines() == [
        "segment     policy     saved MiB  share",
        "a.block0-1  selective       4.00  25.0%",
        "b           recompute      12.00  75.0%",
        "c           offload            -      -",
    ]
    assert plan.table().splitlines()[1] == "a.block0-1  selective"
    assert Plan().table() == "nothing is recomputed\n"
