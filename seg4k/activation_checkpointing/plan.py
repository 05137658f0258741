"""A plan: which segment is recomputed, and how."""

import json
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from typing import Any

from seg4k.activation_checkpointing.segments import is_inside, members
from seg4k.errors import UserError

SCHEMA = 1


class Policy(StrEnum):
    """What becomes of the activations of a segment between forward and backward."""

    KEEP = "keep"
    """They are kept, as without activation checkpointing."""
    RECOMPUTE = "recompute"
    """They are freed, and computed again from the segment's inputs in backward."""
    SELECTIVE = "selective"
    """As recompute, but the results of attention are kept."""
    OFFLOAD = "offload"
    """As recompute, with the segment's inputs held in host memory meanwhile."""


class Plan(Mapping[str, Policy]):
    """An ordered mapping of segment name to policy; a segment that it does not name is kept.

    Plans are values: immutable, hashable, equal where they hold the same names, policies and order.

    Args:
        policies: segment name (or run of siblings) to policy, or the text of one.

    Raises:
        UserError: an unknown policy, or a segment named twice (alone and in a run).
    """

    __slots__ = ("_policies",)

    def __init__(
        self, policies: Mapping[str, Policy | str] | Iterable[tuple[str, Policy | str]] = ()
    ) -> None:
        items = policies.items() if isinstance(policies, Mapping) else policies
        self._policies: dict[str, Policy] = {}
        owner: dict[str, str] = {}
        for name, policy in items:
            for member in members(name):
                if member in owner:
                    raise UserError(
                        f"activation_checkpointing: the plan names {member} twice, in {owner[member]} and in "
                        f"{name}. Leave one of them out."
                    )
                owner[member] = name
            self._policies[name] = to_policy(policy, name)

    def __getitem__(self, name: str) -> Policy:
        return self._policies[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._policies)

    def __len__(self) -> int:
        return len(self._policies)

    def __hash__(self) -> int:
        return hash(tuple(self._policies.items()))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Plan):
            return NotImplemented
        return list(self._policies.items()) == list(other._policies.items())

    def __repr__(self) -> str:
        inside = ", ".join(f"{name!r}: {policy.value!r}" for name, policy in self._policies.items())
        return f"Plan({{{inside}}})"

    def policy(self, name: str) -> Policy:
        """The policy of a segment: its own or its run's, `keep` where the plan does not name it."""
        for other, policy in self._policies.items():
            if name == other or name in members(other):
                return policy
        return Policy.KEEP

    def recomputed(self) -> list[str]:
        """The names of the segments and runs that are not kept, in order."""
        return [name for name, policy in self._policies.items() if policy is not Policy.KEEP]

    def as_list(self) -> list[dict[str, str]]:
        """`[{"name": ..., "policy": ...}, ...]`, as run cards and plan files hold it."""
        return [{"name": name, "policy": policy.value} for name, policy in self._policies.items()]

    def to_json(self) -> str:
        """The plan as JSON text, which `from_json` reads back."""
        return json.dumps({"schema": SCHEMA, "segments": self.as_list()}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """The plan in JSON text: what `to_json` and `seg4k plan` write, or `{"name": "policy", ...}`.

        Names are taken as they are; `make_plan("plan", ...)` also resolves patterns.

        Raises:
            UserError: not JSON, or not such a plan.
        """
        return cls(read_policies(text))

    def table(self, saved_bytes: Mapping[str, int] | None = None) -> str:
        """The plan as a text table.

        Args:
            saved_bytes: per segment, bytes saved for backward where nothing is recomputed. Adds each
                segment's size and its share of all saved activations; as a rule of thumb a segment worth
                recomputing as one holds 10-25% of them. A run is the sum of its members. Nested segments are
                part of their parent, so the total is taken over the outermost names.
        """
        header = ("segment", "policy")
        rows: list[tuple[str, ...]] = [(name, policy.value) for name, policy in self._policies.items()]
        if saved_bytes is not None:
            total = sum(
                size
                for name, size in saved_bytes.items()
                if not any(is_inside(name, other) for other in saved_bytes)
            )
            header = (*header, "saved MiB", "share")  # type: ignore[assignment]
            rows = [(*row, *_size_and_share(row[0], saved_bytes, total)) for row in rows]
        if not rows:
            return "nothing is recomputed\n"
        widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]

        def line(row: tuple[str, ...]) -> str:
            cells = [
                cell.ljust(width) if column < 2 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            return "  ".join(cells).rstrip()

        return "\n".join([line(header), *map(line, rows)]) + "\n"


def _size_and_share(name: str, saved_bytes: Mapping[str, int], total: int) -> tuple[str, str]:
    known = name in saved_bytes or all(member in saved_bytes for member in members(name))
    if not known:
        return "-", "-"
    size = saved_bytes[name] if name in saved_bytes else sum(saved_bytes[m] for m in members(name))
    return f"{size / 2**20:.2f}", f"{size / total:.1%}" if total else "-"


def to_policy(value: object, name: str) -> Policy:
    """The policy that a text means.

    Raises:
        UserError: it means none.
    """
    try:
        return Policy(str(value))
    except ValueError:
        known = ", ".join(policy.value for policy in Policy)
        raise UserError(
            f"activation_checkpointing: {name} has the policy {value!r}; choose one of {known}"
        ) from None


def read_policies(text: str) -> list[tuple[str, str]]:
    """Names (or patterns) and policies in the JSON of a plan, in order.

    Raises:
        UserError: not JSON, or not a plan.
    """
    try:
        value: Any = json.loads(text)
    except ValueError as error:
        raise UserError(f"activation_checkpointing: the plan is not JSON: {error}") from None
    if isinstance(value, dict) and "segments" in value:
        if value.get("schema", SCHEMA) != SCHEMA:
            raise UserError(
                f"activation_checkpointing: the plan has schema {value['schema']}, and this version reads "
                f"{SCHEMA}. Make it again with this version."
            )
        value = value["segments"]
    if isinstance(value, list) and all(
        isinstance(item, dict) and {"name", "policy"} <= set(item) for item in value
    ):
        value = {item["name"]: item["policy"] for item in value}
    if not isinstance(value, dict) or not all(isinstance(policy, str) for policy in value.values()):
        raise UserError(
            'activation_checkpointing: a plan is {"schema": 1, "segments": [{"name": "encoder.stage0", '
            '"policy": "recompute"}, ...]} or {"encoder.stage*": "recompute", ...}'
        )
    return list(value.items())
