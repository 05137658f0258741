"""What the CPU's libraries hold inside an operator, beside its operands and results.

oneDNN computes convolutions on copies in its own blocked layout, whose channels come in groups of a vector's
width: of the input, the weight and the result on the way forward, and likewise on the way back. It takes them
from PyTorch's allocator, so that a measured peak on the CPU contains them. CUDA has no such copies. The sizes
here follow the order in which the copies are made and let go of, as read from allocator events (torch 2.14,
AVX-512); buffers of a few KiB and those that depend on the number of threads are left out.

Gloo, which exchanges tensors between processes on the CPU, reduces a copy of what it is to scatter, and
gathers into a copy of the result.
"""

import math
from typing import Any

import torch

from seg4k.memory.operand_copies import copied_operand_bytes

__all__ = ["library_bytes"]

aten = torch.ops.aten


def _vector_channels() -> int:
    return 16 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 8


def _blocked(tensor: torch.Tensor, *dims: int) -> int:
    """Bytes of a tensor whose channel dimensions `dims` are padded to whole vectors."""
    shape = list(tensor.shape)
    for dim in dims:
        shape[dim] = -(-shape[dim] // _vector_channels()) * _vector_channels()
    return math.prod(shape) * tensor.element_size()


def _image(tensor: torch.Tensor) -> int:
    # Images with fewer channels than half a vector, as the network's input, are read as they are.
    return 0 if tensor.shape[1] < _vector_channels() // 2 else _blocked(tensor, 1)


def _plain(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel() * tensor.element_size()


def _convolution(args: tuple[Any, ...], out: torch.Tensor) -> int:
    image, weight = _image(args[0]), _blocked(args[1], 0, 1)
    result = _blocked(out, 1)
    return max(image + weight + result - _plain(out), result)


def _convolution_backward(args: tuple[Any, ...], out: tuple[torch.Tensor | None, ...]) -> int:
    gradient, weight, image = _blocked(args[0], 1), _blocked(args[2], 0, 1), _image(args[1])
    to_image, to_weight = out[0], out[1]
    results = sum(map(_plain, out))
    first = second = 0
    if to_image is not None:
        first = gradient + weight + _blocked(to_image, 1) - results
    if to_weight is not None:
        second = gradient + image + weight - _plain(to_weight)
        if args[0].dtype in (torch.bfloat16, torch.float16):
            # Transposed copies of both, and a sum over the pixels in fp32.
            second += gradient + image + 4 * weight // to_weight.element_size()
    return max(first, second)


def library_bytes(func: Any, args: tuple[Any, ...], out: Any) -> int:  # noqa: ANN401 - torch's operator
    """Bytes beyond operands and results at the worst moment of an operator; 0 where it holds none."""
    if func is aten.convolution.default:
        return copied_operand_bytes(func, args) + max(0, _convolution(args, out))
    if func is aten.convolution_backward.default:
        return copied_operand_bytes(func, args) + max(0, _convolution_backward(args, out))
    if func is aten.native_batch_norm_backward.default:
        return _plain(out[0])
    if func is torch.ops.c10d._reduce_scatter_base_.default:
        return _plain(args[1])
    if func is torch.ops.c10d._allgather_base_.default:
        return _plain(args[0])
    return 0
