"""What the CPU's libraries hold inside an operator, beside its operands and results.

oneDNN computes convolutions on copies in its own blocked layout, whose channels come in groups of a vector's
width: of the input, the weight and the result on the way forward, and likewise on the way back. It takes them
from PyTorch's allocator, so that a measured peak on the CPU contains them. CUDA has no such copies. The sizes
here follow the order in which the copies are made and let go of, as read from allocator events (torch 2.14,
AVX-512); buffers of a few KiB and those that depend on the number of threads are left out.

Gloo, which exchanges tensors between processes on the CPU, reduces a copy of what it is to scatter, and
gathers into a copy of the result. It does so in a thread of its own: where another process is late, the copy
waits for it, and a measured peak may contain one segment's gathered parameters more than the trace has.
"""

import math
from typing import Any

import torch

from seg4k.memory.operand_copies import copied_operand_bytes

__all__ = ["library_bytes"]

aten = torch.ops.aten


def _vector_channels() -> int:
    return 16 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 8


def _blocked(tensor: torch.Tensor, *dims: int, channels: int | None = None) -> int:
    """Bytes of a tensor whose channel dimensions `dims` are padded to whole vectors, or to `channels`."""
    group = channels or _vector_channels()
    shape = list(tensor.shape)
    for dim in dims:
        shape[dim] = -(-shape[dim] // group) * group
    return math.prod(shape) * tensor.element_size()


def _image(tensor: torch.Tensor) -> int:
    # On the way forward images with fewer channels than a vector are read as they are.
    return 0 if tensor.shape[1] < _vector_channels() else _blocked(tensor, 1)


def _plain(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel() * tensor.element_size()


def _convolution(args: tuple[Any, ...], out: torch.Tensor) -> int:
    image, weight = _image(args[0]), _blocked(args[1], 0, 1)
    result = _blocked(out, 1)
    return max(image + weight + result - _plain(out), result)


def _convolution_backward(args: tuple[Any, ...], out: tuple[torch.Tensor | None, ...]) -> int:
    weight = _blocked(args[2], 0, 1)
    to_image, to_weight = out[0], out[1]
    results = sum(map(_plain, out))
    first = second = 0
    if to_image is not None:
        first = _blocked(args[0], 1) + weight + _blocked(to_image, 1) - results
    if to_weight is not None:
        half = args[0].dtype in (torch.bfloat16, torch.float16)
        second = _for_weight(args[0], args[1], to_weight, half) - _plain(to_weight)
    return max(first, second)


def _for_weight(gradient: torch.Tensor, image: torch.Tensor, weight: torch.Tensor, half: bool) -> int:
    """Bytes from which the gradient of a weight is computed.

    They are copies of the result's gradient and the image; few channels are grouped by half a vector, and the
    1 to 3 of a network's input are read as they are. In half precision both are transposed once more, and
    summed over the pixels in fp32; few channels on both sides are multiplied as columns, one for each tap.
    """
    vector, channels, results = _vector_channels(), image.shape[1], gradient.shape[1]
    blocked = _blocked(weight, 0, 1)
    if half and 3 < channels < vector:
        if results < vector:
            taps = weight.shape[2] * weight.shape[3]
            return taps * channels * gradient.shape[2] * gradient.shape[3] * image.element_size()
        return _blocked(gradient, 1) + _blocked(image, 1) + blocked
    few = vector // 2 if channels <= vector // 2 and not half else None
    copies = 0 if channels <= 3 else _blocked(image, 1, channels=few)
    copies += _blocked(gradient, 1, channels=few if few and results <= few else None)
    if half:
        return 2 * copies + blocked + 4 * blocked // weight.element_size()
    return copies + blocked


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
