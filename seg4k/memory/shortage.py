"""Whether an error says that memory ran out."""

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """Whether it does; the allocator of the CPU raises a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
