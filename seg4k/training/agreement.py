"""What the processes of a run tell each other outside of training steps."""

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from seg4k.errors import UserError

Value = TypeVar("Value")
LETTING_GO_SECONDS = 0.2


def decided_by_the_first(decide: Callable[[], Value], *, connected: bool) -> Value:
    """What `decide` returns in the first process, in all of them; the others do not call it.

    Args:
        decide: returns something that can be pickled.
        connected: whether the processes are connected; this one is alone where they are not.

    Raises:
        UserError: in the other processes, where the first one raised; there its own error goes on.
    """
    if not connected:
        return decide()
    said: list[Any] = [None, None]
    if torch.distributed.get_rank() == 0:
        try:
            said[0] = decide()
        except BaseException as error:
            torch.distributed.broadcast_object_list([None, f"{type(error).__name__}: {error}"])
            raise
    torch.distributed.broadcast_object_list(said)
    if said[1] is not None:
        raise UserError(f"the first process ended with {said[1]}")
    value: Value = said[0]
    return value


def of_every_process(value: Value, *, connected: bool) -> list[Value]:
    """The values of all processes, in order of rank, in all of them; `connected` as above."""
    if not connected:
        return [value]
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def leave_process_group() -> None:
    """Destroy the process group, and give gloo's threads the time to let go of what they hold.

    They need the interpreter to drop the tensors of the last exchange. A thread that comes to it only while
    the interpreter ends aborts the process, before Python 3.14 (pytorch/pytorch#190489). Torch does not tell
    whether any is left to come.
    """
    torch.distributed.destroy_process_group()
    time.sleep(LETTING_GO_SECONDS)
