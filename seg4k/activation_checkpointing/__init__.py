"""What to recompute: segments, plans, modes, application and guards.

plan = make_plan("stage", list(model.segments()))
apply_activation_checkpointing(model, plan)
"""

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

__all__ = [
    "MODES",
    "ActivationCheckpointingError",
    "AppliedPlan",
    "Plan",
    "Policy",
    "activation_checkpointing",
    "applied_plan",
    "apply_activation_checkpointing",
    "make_plan",
    "remove_activation_checkpointing",
    "segments_of",
]
