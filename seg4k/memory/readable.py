"""Sizes and amounts of work as people read them."""

__all__ = ["GIB", "gib", "tera"]

GIB = 1 << 30


def gib(size: float) -> str:
    """Bytes in GiB, or in MiB where they are few."""
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / (1 << 20):.1f} MiB"


def tera(flops: float) -> str:
    """FLOPs in units of 10^12, or of 10^9 where they are few."""
    return f"{flops / 1e12:.2f} TFLOP" if flops >= 1e10 else f"{flops / 1e9:.2f} GFLOP"
