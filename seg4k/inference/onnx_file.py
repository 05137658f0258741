"""Writing a traced model as ONNX, so that it computes what torch computes."""

import importlib
import json
import logging
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import seg4k
from seg4k.errors import UserError
from seg4k.files import atomic_path
from seg4k.inference.segmenter import Segmenter

OPSET = 18
_INSTALL = "pip install 'seg4k[export]'"
# Protocol buffers end at 2 GiB; beyond, ONNX needs several files.
_LARGEST_ONNX = 2 * 2**30 - 2**26


def require_onnx() -> None:
    """Raise a UserError where a package that ONNX needs is missing."""
    for name in ("onnx", "onnxscript", "onnxruntime"):
        try:
            importlib.import_module(name)
        except ImportError:
            raise UserError(
                f"ONNX needs the package {name}: {_INSTALL}, or export for torch only: output=FILE.pt2"
            ) from None


def save_onnx(
    path: Path, program: torch.export.ExportedProgram, segmenter: Segmenter, about: Mapping[str, Any]
) -> None:
    """Write the program with what it says of itself, atomically.

    Raises:
        UserError: where the model is larger than an ONNX file can be.
    """
    held = sum(tensor.numel() * tensor.element_size() for tensor in segmenter.model.state_dict().values())
    if held > _LARGEST_ONNX:
        raise UserError(
            f"the model has {held / 2**30:.1f} GiB, ONNX files end at 2 GiB; take output=FILE.pt2"
        )
    with quiet():
        made = torch.onnx.export(
            program,
            (),
            None,
            dynamo=True,
            verbose=False,
            opset_version=OPSET,
            input_names=["image"],
            output_names=["logits"],
            custom_translation_table=translations(),
        )
        assert made is not None
        made.model.producer_name, made.model.producer_version = "seg4k", seg4k.__version__
        for key, value in about.items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            made.model.metadata_props[f"seg4k.{key}"] = text
        with atomic_path(path) as temporary:
            made.save(temporary)


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """What of Python's arithmetic on sizes the exporter does not translate as Python computes it.

    It makes `a // b` of two sizes an ONNX Div, which rounds towards zero: a ceiling written as -(-a // b),
    as of the decoder's levels, is then a floor, and a map of patches of 14 pixels a row or a column short.
    """
    from onnxscript import opset18 as op  # of the version OPSET

    def floordiv(dividend, divisor):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202 - typed by the trace
        # ONNX's Mod of integers has the sign of the divisor, as Python's has: the division leaves no rest.
        return op.Div(op.Sub(dividend, op.Mod(dividend, divisor)), divisor)

    return {operator.floordiv: floordiv}


@contextmanager
def quiet() -> Iterator[None]:
    """The exporters warn of their own internals, which no user can mend."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
