"""Modes: named rules that make a plan from the names of a model's segments."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from seg4k.activation_checkpointing.plan import Plan, Policy, read_policies
from seg4k.activation_checkpointing.segments import group_runs, is_inside, matching, members, resolve
from seg4k.errors import UserError

STAGES = "encoder.stage*"
BLOCKS = "encoder.stage*.block*"
NECK = "neck.*"
DECODER = "decoder.block*"

PATTERNS: Mapping[str, Mapping[str, Policy]] = {
    "none": {},
    "stage": {STAGES: Policy.RECOMPUTE, NECK: Policy.RECOMPUTE, DECODER: Policy.RECOMPUTE},
    "block": {BLOCKS: Policy.RECOMPUTE, NECK: Policy.RECOMPUTE, DECODER: Policy.RECOMPUTE},
    "layer": {
        "encoder.patch_embed": Policy.RECOMPUTE,
        "encoder.stage*.block*.*": Policy.RECOMPUTE,
        NECK: Policy.RECOMPUTE,
        DECODER: Policy.RECOMPUTE,
        "decoder.block*.*": Policy.RECOMPUTE,
    },
    "encoder": {STAGES: Policy.RECOMPUTE},
    "decoder": {NECK: Policy.RECOMPUTE, DECODER: Policy.RECOMPUTE},
    "selective": {STAGES: Policy.SELECTIVE, NECK: Policy.RECOMPUTE, DECODER: Policy.RECOMPUTE},
}
"""Pattern to policy, per mode. The neck counts as the decoder's side: it exists for it alone."""

MODES = (*PATTERNS, "auto", "plan")


def make_plan(
    mode: str,
    segment_names: Sequence[str],
    *,
    blocks_per_segment: int = 1,
    path: Path | str | None = None,
    segments: Mapping[str, Policy | str] | None = None,
) -> Plan:
    """The plan of a mode for a model with these segments.

    Args:
        mode: one of `MODES` but `auto`, which the memory planner makes.
        segment_names: the names of the model's segments in forward order.
        blocks_per_segment: in mode `block`, how many consecutive blocks of a stage are recomputed together.
        path: in mode `plan`, a JSON file as `Plan.to_json` or `seg4k plan` write it. Its names may be
            patterns, and a later one overrides an earlier one.
        segments: in mode `plan`, the same as a mapping, in place of a file.

    Raises:
        UserError: an unknown mode, an argument that belongs to another mode, a name or pattern that matches
            no segment, or a mode that finds nothing to recompute in this model.
    """
    if mode == "auto":
        raise UserError(
            "activation_checkpointing=auto: the memory planner makes this plan; run `seg4k plan` or `seg4k "
            "train`, or give the file that it wrote as activation_checkpointing=plan "
            "activation_checkpointing.path=plan.json"
        )
    if mode not in MODES:
        raise UserError(f"activation_checkpointing={mode}: choose one of {', '.join(MODES)}")
    if blocks_per_segment != 1 and mode != "block":
        raise UserError(
            f"activation_checkpointing.blocks_per_segment={blocks_per_segment} belongs to "
            f"activation_checkpointing=block, not {mode}"
        )
    if blocks_per_segment < 1:
        raise UserError(f"activation_checkpointing.blocks_per_segment={blocks_per_segment}: give 1 or more")
    if mode == "plan":
        return _explicit(segment_names, path, segments)
    if path is not None or segments is not None:
        raise UserError(
            f"activation_checkpointing.path and .segments belong to activation_checkpointing=plan, not {mode}"
        )
    patterns = PATTERNS[mode]
    found = {
        name: policy for pattern, policy in patterns.items() for name in matching(pattern, segment_names)
    }
    if mode == "layer":  # the finest alone: a unit with units inside is not recomputed as a whole as well
        found = {n: p for n, p in found.items() if not any(is_inside(other, n) for other in found)}
    if patterns and not found:
        raise UserError(
            f"activation_checkpointing={mode} recomputes {', '.join(patterns)}, and this model has no such "
            f"segments. It has: {', '.join(segment_names)}. Name them in activation_checkpointing=plan."
        )
    ordered = [name for name in segment_names if name in found]
    grouped = group_runs_of(ordered, blocks_per_segment)
    return Plan({name: found.get(name, Policy.RECOMPUTE) for name in grouped})


def group_runs_of(names: Sequence[str], size: int) -> list[str]:
    """Join blocks of encoder stages, `size` at a time, and leave all else as it is."""
    blocks = matching(BLOCKS, names)
    runs = group_runs(blocks, size)
    result: list[str] = []
    for name in names:
        if name not in blocks:
            result.append(name)
        elif name == blocks[0]:
            result += runs
    return result


def _explicit(
    names: Sequence[str], path: Path | str | None, segments: Mapping[str, Policy | str] | None
) -> Plan:
    if (path is None) == (segments is None):
        raise UserError(
            "activation_checkpointing=plan: give the plan either as a file, activation_checkpointing.path, "
            "or as a mapping, activation_checkpointing.segments"
        )
    if path is not None:
        path = Path(path)
        if not path.is_file():
            raise UserError(f"activation_checkpointing.path={path}: no such file")
        items: list[tuple[str, Policy | str]] = list(read_policies(path.read_text(encoding="utf-8")))
    else:
        items = list((segments or {}).items())
    policies: dict[str, Policy | str] = {}
    for pattern, policy in items:
        for name in resolve(pattern, names):
            policies[name] = policy
    order = sorted(policies, key=lambda name: names.index(members(name)[0]))
    return Plan({name: policies[name] for name in order})
