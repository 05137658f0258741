"""`seg4k export`: a checkpoint as ONNX and as torch.export, verified at once on real images."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import seg4k
from seg4k.data.settings import as_path
from seg4k.errors import UserError
from seg4k.files import atomic_path, write_json
from seg4k.inference.onnx_file import quiet, require_onnx, save_onnx
from seg4k.inference.segmenter import Segmenter, load_segmenter
from seg4k.inference.verification import (
    Verified,
    batches_of,
    check_count,
    check_onnx_fits,
    images_to_verify,
    shapes_to_verify,
    verify_onnx,
    verify_torch,
    whole_patches,
)

SCHEMA = 1
LEAST_AGREEMENT = 0.999


def run(config: Mapping[str, Any]) -> int:
    """Export, verify, print both; the exit status is 1 where labels agree on under 99.9% of the pixels.

    Raises:
        UserError: a mistake in the configuration, a package that is missing, or a size too large to verify.
    """
    check_count(config["count"])
    onnx_path, torch_path, report_path = _targets(config["output"])
    if onnx_path is not None:
        require_onnx()
    # Exported in fp32: whoever runs the file chooses what to make of it.
    segmenter = load_segmenter(config["checkpoint"], "cpu", "fp32")
    size = _fixed_size(config["size"], segmenter.model.encoder.patch_size)
    if onnx_path is not None and size is not None:
        check_onnx_fits(segmenter, size)
    program, dynamic = _program(segmenter, size)
    fixed = None if dynamic else _size_of(program)
    about = describe(segmenter, fixed)
    shapes = shapes_to_verify(segmenter, fixed, config["count"])
    if onnx_path is not None and fixed is not None and size is None:
        check_onnx_fits(segmenter, fixed)
    batches = batches_of(images_to_verify(segmenter, config["images"], shapes), shapes)

    checks: list[Verified] = []
    if torch_path is not None:
        with atomic_path(torch_path) as temporary, quiet():
            torch.export.save(program, temporary, extra_files={"seg4k.json": json.dumps(about)})
        checks.append(verify_torch(torch_path, segmenter, batches))
    if onnx_path is not None:
        save_onnx(onnx_path, program, segmenter, about)
        checks.append(verify_onnx(onnx_path, segmenter, batches))
    good = all(check.agreement >= LEAST_AGREEMENT for check in checks)
    if report_path is not None:
        report = {"schema": SCHEMA, "checkpoint": str(config["checkpoint"]), **about, "passed": good}
        write_json(report_path, {**report, "verified": [vars(check) for check in checks]})
    sizes = "any multiple of " + "x".join(map(str, segmenter.model.encoder.patch_size))
    print(f"input: (batch, {segmenter.in_channels}, height, width), float32 in [0, 1], normalised inside")
    print(f"size: {sizes if dynamic else 'x'.join(map(str, _size_of(program)))} (height x width); any batch")
    for check in checks:
        print(
            f"{check.file}: max difference {check.max_difference:.2e} of logits up to "
            f"{check.largest_logit:.3g}, labels agree on {check.agreement:.4%}"
        )
    if not good:
        print(f"FAILED: labels must agree on {LEAST_AGREEMENT:.1%} of the pixels; do not use the file")
    return 0 if good else 1


def describe(segmenter: Segmenter, size: tuple[int, int] | None) -> dict[str, Any]:
    """What an exported file says of itself: classes, normalisation, what it takes and gives."""
    encoder = segmenter.model.encoder
    return {
        "version": seg4k.__version__,
        "classes": segmenter.classes.to_dict()["classes"],
        "ignore_index": segmenter.classes.ignore_index,
        "normalisation": {"mean": list(encoder.mean), "std": list(encoder.std), "inside": True},
        "encoder": segmenter.config["model"]["encoder"]["name"],
        "input": {
            "name": "image",
            "layout": "batch, channels, height, width",
            "type": "float32 in [0, 1], colours in the order RGB",
            "size": list(size) if size else None,
            "size_multiple": list(encoder.patch_size),
        },
        "output": {"name": "logits", "layout": "batch, classes, height, width", "label": "argmax of classes"},
    }


def _targets(output: str | None) -> tuple[Path | None, Path | None, Path | None]:
    """The paths of the ONNX file, the torch.export file and the report; None for what is not asked for."""
    if not output:
        raise UserError("output must be set: a folder (model.onnx and model.pt2), FILE.onnx or FILE.pt2")
    path = as_path("output", output)
    if path.suffix == ".onnx":
        return path, None, None
    if path.suffix == ".pt2":
        return None, path, None
    if path.is_file() or path.suffix in (".pt", ".pth", ".ckpt"):
        raise UserError(f"output={output}: give a folder, or a file that ends in .onnx or .pt2")
    return path / "model.onnx", path / "model.pt2", path / "export.json"


def _fixed_size(value: object, patch: tuple[int, int]) -> tuple[int, int] | None:
    if value is None:
        return None
    if (
        not isinstance(value, (list, tuple))
        or len(value) != 2
        or not all(isinstance(side, int) and not isinstance(side, bool) and side > 0 for side in value)
    ):
        raise UserError(f"size={value}: give [height, width] in pixels, or null for any size")
    height, width = value
    if height % patch[0] or width % patch[1]:
        up = [-(-side // step) * step for side, step in zip(value, patch, strict=True)]
        raise UserError(f"size={list(value)}: must be whole patches of {patch[0]}x{patch[1]}; take size={up}")
    return height, width


def _program(segmenter: Segmenter, size: tuple[int, int] | None) -> tuple[torch.export.ExportedProgram, bool]:
    """The graph, with any batch and, where `size` is None and the encoder allows it, any size; and which."""
    from torch.export import Dim

    patch = segmenter.model.encoder.patch_size
    if size is None:
        rows, columns = Dim("rows", min=2), Dim("columns", min=2)
        any_size = {0: Dim("batch"), 2: patch[0] * rows, 3: patch[1] * columns}
        trained = whole_patches(segmenter, segmenter.config["data"]["image_size"])
        example = (4 * patch[0], 6 * patch[1])
        if example == trained:  # the size of training may take a way of its own through the model
            example = (5 * patch[0], 7 * patch[1])
        try:
            program = _trace(segmenter, example, any_size)
            _assert_any_size(program, segmenter, trained)
            return program, True
        except Exception as error:  # the exporter's own errors, of many kinds, where a size is baked in
            reason = str(error).strip().splitlines()[0][:200]
            size = trained
            print(f"this encoder does not export with any size ({reason})\nfixed to {size[0]}x{size[1]}")
    return _trace(segmenter, size, {0: Dim("batch")}), False


def _trace(segmenter: Segmenter, size: tuple[int, int], dims: Mapping[int, Any]) -> Any:  # noqa: ANN401
    example = torch.rand(2, segmenter.in_channels, *size)
    with quiet(), torch.no_grad():
        return torch.export.export(segmenter.model, (example,), dynamic_shapes=(dims,))


@torch.no_grad()
def _assert_any_size(
    program: torch.export.ExportedProgram, segmenter: Segmenter, size: tuple[int, int]
) -> None:
    """Raise where the program kept the size of its example, or does not run at another.

    On fake tensors: a whole 4K image takes no memory and no time.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    (image,) = (node for node in program.graph.nodes if node.name in program.graph_signature.user_inputs)
    if not all(isinstance(side, torch.SymInt) for side in image.meta["val"].shape[2:]):
        raise ValueError("the model takes another way at each size")
    with quiet(), FakeTensorMode(allow_non_fake_inputs=True):
        program.module()(torch.empty(1, segmenter.in_channels, *size))


def _size_of(program: torch.export.ExportedProgram) -> tuple[int, int]:
    assert program.example_inputs is not None
    (image,) = program.example_inputs[0]
    return int(image.shape[2]), int(image.shape[3])
