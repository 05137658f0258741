"""CUDA's rules for a step that is traced on fake CPU tensors.

Fake CUDA tensors do not train without a GPU: autocast turns itself off and attention takes its math path.
Fake CPU tensors do, once three things are made as CUDA has them: which operators autocast runs in fp32,
which attention operator runs, and that the allocator hands out multiples of 512 bytes.

The rules are registered with PyTorch's dispatcher, so that they hold for every caller and in recomputation
too, and taken back on leaving. They hold for the whole process meanwhile: trace in a process of its own.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

ALLOCATION_BYTES = 512
"""CUDA's allocator rounds up to this (kMinBlockSize in c10/cuda/CUDACachingAllocator.cpp)."""

_NAMES = str.split

# The operators that autocast on CUDA runs in fp32 (AT_FORALL_FP32 and AT_FORALL_FP32_SET_OPT_DTYPE in
# aten/src/ATen/autocast_mode.h, PyTorch 2.9 to 2.14). Those that take a dtype get it instead of a cast.
FP32 = _NAMES("""
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan
    pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm group_norm
    frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss
    nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss
    margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss
    binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp
    upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d
    upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
    _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa
""")
FP32_BY_DTYPE = _NAMES("""
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum
    linalg_vector_norm linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList
""")

_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


def _overload(name: str) -> Any:  # noqa: ANN401 - torch's OpOverload
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _widen(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16):
        return value.float()
    return value


def _in_fp32(operator: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            wide = {name: _widen(value) for name, value in kwargs.items()}
            return operator(*map(_widen, args), **wide)

    return run


def _with_fp32_result(operator: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        half = args[0].dtype in (torch.bfloat16, torch.float16)
        if half and kwargs.get("dtype") is None and not any(isinstance(a, torch.dtype) for a in args):
            kwargs["dtype"] = torch.float32
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return operator(*args, **kwargs)

    return run


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """What `scaled_dot_product_attention` runs on CUDA: flash, or for masks and fp32 the efficient kernel."""
    if query.dtype in (torch.bfloat16, torch.float16) and attn_mask is None:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]  # type: ignore[no-any-return]
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    needed = query.requires_grad or key.requires_grad or value.requires_grad
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
        attn_mask = attn_mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    result = efficient(query, key, value, attn_mask, needed, dropout_p, is_causal, scale=scale)[0]
    return result  # type: ignore[no-any-return]


@contextlib.contextmanager
def cuda_rules() -> Iterator[None]:
    """Have operators on CPU tensors choose dtypes and attention as on CUDA, in the whole process."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    register: Callable[..., None] = library.impl
    try:
        for name in FP32:
            register(name, _in_fp32(_overload(name)), "AutocastCPU")
        for name in FP32_BY_DTYPE:
            register(name, _with_fp32_result(_overload(name)), "AutocastCPU")
        register("scaled_dot_product_attention", _attention, "AutogradCPU")
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]
