"""What planning reads of a configuration, checked before anything is built."""

from collections.abc import Mapping
from typing import Any

from seg4k.errors import UserError
from seg4k.memory.budget import KEY, parse_bytes
from seg4k.training.ranges import check_ranges


def check_planned(config: Mapping[str, Any]) -> None:
    """Refuse numbers and sizes of which no step could be made.

    Raises:
        UserError: naming the key, its value and what is allowed.
    """
    check_ranges(config)
    classes, size = config["plan"]["num_classes"], config["data"].get("image_size")
    if classes is not None and not _counts(classes):
        raise UserError(
            f"plan.num_classes={classes}: give a whole number of 1 or more, or null for those of the data"
        )
    if not isinstance(size, list | tuple) or len(size) != 2 or not all(map(_counts, size)):
        raise UserError(
            f"data.image_size={size}: give height and width in pixels, each 1 or more, such as [512,512]"
        )
    if (budget := config["activation_checkpointing"].get("budget")) is not None:
        parse_bytes(budget, KEY)


def _counts(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
