"""What to recompute: segments, plans, modes, application and guards.

plan = make_plan("stage", list(model.segments()))
apply_activation_checkpointing(model, plan)
print(describe_checkpointing(model))
"""

from typing import TYPE_CHECKING, Any

from seg4k.activation_checkpointing.apply import (
    AppliedPlan,
    activation_checkpointing,
    applied_plan,
    apply_activation_checkpointing,
    remove_activation_checkpointing,
)
from seg4k.activation_checkpointing.errors import ActivationCheckpointingError
from seg4k.activation_checkpointing.modes import MODES, make_plan
from seg4k.activation_checkpointing.plan import Plan, Policy
from seg4k.activation_checkpointing.segments import segments_of

if TYPE_CHECKING:
    from seg4k.activation_checkpointing.describe import describe_checkpointing

__all__ = [
    "MODES",
    "ActivationCheckpointingError",
    "AppliedPlan",
    "Plan",
    "Policy",
    "activation_checkpointing",
    "applied_plan",
    "apply_activation_checkpointing",
    "describe_checkpointing",
    "make_plan",
    "remove_activation_checkpointing",
    "segments_of",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever the module holds
    """Import what few need only when it is asked for."""
    if name == "describe_checkpointing":
        from seg4k.activation_checkpointing.describe import describe_checkpointing

        return describe_checkpointing
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
