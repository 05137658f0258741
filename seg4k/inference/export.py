"""`seg4k export`: a checkpoint as ONNX and as torch.export, verified at once on real images."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import seg4k
from seg4k.data.build import build_datamodule
from seg4k.data.images import Image, grey_to_rgb, list_images, read_image
from seg4k.data.samples import to_sample
from seg4k.data.scenes import Window, crop, read_window
from seg4k.data.settings import as_path
from seg4k.errors import UserError
from seg4k.files import atomic_path, write_json
from seg4k.inference.evaluate import data_settings
from seg4k.inference.memory import free_bytes
from seg4k.inference.onnx_file import quiet, require_onnx, save_onnx
from seg4k.inference.segmenter import Segmenter, load_segmenter

SCHEMA = 1
LEAST_AGREEMENT = 0.999
LARGEST_TOKENS = 4096  # of an image to verify on, where there is a choice


@dataclass(frozen=True)
class Verified:
    """How an exported file compares with the model on the same images.

    Attributes:
        file: what was compared.
        shapes: of the batches, (B, C, H, W).
        max_difference: largest absolute difference of two logits.
        largest_logit: largest absolute logit of the model, to judge the difference by.
        agreement: share of pixels whose label is the same.
    """

    file: str
    shapes: list[list[int]]
    max_difference: float
    largest_logit: float
    agreement: float


def run(config: Mapping[str, Any]) -> int:
    """Export, verify, print both; the exit status is 1 where labels agree on under 99.9% of the pixels.

    Raises:
        UserError: a mistake in the configuration, a package that is missing, or a size too large to verify.
    """
    _check_count(config["count"])
    onnx_path, torch_path, report_path = _targets(config["output"])
    if onnx_path is not None:
        require_onnx()
    # Exported in fp32: whoever runs the file chooses what to make of it.
    segmenter = load_segmenter(config["checkpoint"], "cpu", "fp32")
    size = _fixed_size(config["size"], segmenter.model.encoder.patch_size)
    if onnx_path is not None and size is not None:
        _check_onnx_fits(segmenter, size)
    program, dynamic = _program(segmenter, size)
    fixed = None if dynamic else _size_of(program)
    about = describe(segmenter, fixed)
    shapes = _shapes(segmenter, fixed, config["count"])
    if onnx_path is not None and fixed is not None and size is None:
        _check_onnx_fits(segmenter, fixed)
    batches = _batches(_images(segmenter, config["images"], shapes), shapes)

    checks: list[Verified] = []
    if torch_path is not None:
        with atomic_path(torch_path) as temporary, quiet():
            torch.export.save(program, temporary, extra_files={"seg4k.json": json.dumps(about)})
        checks.append(_verify_torch(torch_path, segmenter, batches))
    if onnx_path is not None:
        save_onnx(onnx_path, program, segmenter, about)
        checks.append(_verify_onnx(onnx_path, segmenter, batches))
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
        trained = _whole_patches(segmenter, segmenter.config["data"]["image_size"])
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


def _whole_patches(segmenter: Segmenter, size: Any) -> tuple[int, int]:  # noqa: ANN401 - a pair of numbers
    rows, columns = segmenter.model.encoder.patch_size
    return max(2, int(size[0]) // rows) * rows, max(2, int(size[1]) // columns) * columns


def _shapes(segmenter: Segmenter, fixed: tuple[int, int] | None, count: int) -> list[tuple[int, int, int]]:
    """The batches to verify on, as (images, height, width).

    With any size: one image at twice the training size, `count` at the training size. Both sizes are shrunk,
    in proportion, where they have more than 4096 and 1024 tokens: attention in an ONNX file is a matrix of
    tokens by tokens, 50 GiB of them for one 4K image. With a fixed size: one image, and `count` where the
    size is no larger.
    """
    rows, columns = segmenter.model.encoder.patch_size
    if fixed is not None:
        few = fixed[0] // rows * (fixed[1] // columns) > LARGEST_TOKENS
        return [(1, *fixed)] if few or count == 1 else [(1, *fixed), (count, *fixed)]
    height, width = _whole_patches(segmenter, segmenter.config["data"]["image_size"])
    down, across = height // rows, width // columns
    shrink = min(1.0, (LARGEST_TOKENS / 4 / (down * across)) ** 0.5)
    small = max(2, int(down * shrink)) * rows, max(2, int(across * shrink)) * columns
    return [(1, 2 * small[0], 2 * small[1]), (count, *small)]


def _check_onnx_fits(segmenter: Segmenter, size: tuple[int, int]) -> None:
    """Refuse a fixed size at which the ONNX file could not be run, and so not verified, on this machine."""
    encoder = segmenter.model.encoder
    tokens = size[0] // encoder.patch_size[0] * (size[1] // encoder.patch_size[1])
    heads = max(int(getattr(module, "num_heads", 1)) for module in encoder.modules())
    wanted, free = 2 * 4 * heads * tokens**2, free_bytes(segmenter.device)
    if wanted > free:
        raise UserError(
            f"ONNX at the fixed size {size[0]}x{size[1]}: its attention is {heads} matrices of {tokens} by "
            f"{tokens} tokens, {wanted / 2**30:.0f} GiB with their softmax, and {free / 2**30:.0f} GiB are "
            "free, so it cannot be verified here. Give a smaller size=[height,width], or output=FILE.pt2, "
            "whose attention holds no matrix."
        )


def _check_count(count: object) -> None:
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise UserError(f"count={count}: give a whole number from 1 up")


def _images(segmenter: Segmenter, source: str | None, shapes: list[tuple[int, int, int]]) -> list[Tensor]:
    """Real images (C, H, W), float32 in [0, 1]: of `source`, or of the checkpoint's data."""
    count = max(shape[0] for shape in shapes)
    wanted = (max(shape[1] for shape in shapes), max(shape[2] for shape in shapes))
    tensors = []
    for number in range(count):
        # Spread over the diagonal, so that a few images, or one large one, give different windows.
        array = _window(segmenter, source, number, (number + 0.5) / count, wanted)
        if segmenter.takes_grey(array):
            array = grey_to_rgb(array)
        if array.shape[2] != segmenter.in_channels:
            raise UserError(
                f"the images have {array.shape[2]} channels where the checkpoint takes "
                f"{segmenter.in_channels}; give images=FOLDER with images of its kind"
            )
        image: Tensor = to_sample(array, array[:, :, 0], "")["image"]
        tensors.append(image.float() / (255 if image.dtype == torch.uint8 else 1))
    return tensors


def _window(
    segmenter: Segmenter, source: str | None, number: int, place: float, size: tuple[int, int]
) -> Image:
    """A window (h, w, C) of the image of this number, at this share of its diagonal."""

    def window(whole: tuple[int, ...]) -> Window:
        top, left = (int(max(0, whole[axis] - size[axis]) * place) for axis in (0, 1))
        return Window(top, left, *size)

    if source is not None:
        paths = list_images(source)
        array = read_image(paths[number % len(paths)])
        return crop(array, window(array.shape))
    try:
        settings = data_settings({"name": "checkpoint"}, segmenter.config["data"])
        scenes = build_datamodule(settings, seed=0, batch_size=1).val_dataset().scenes
        scene = scenes[number % len(scenes)]
        return read_window(scene, window(scene.size), segmenter.classes.ignore_index)[0]
    except UserError as error:
        raise UserError(
            f"the data of the checkpoint cannot be read to verify the export ({error}); "
            "give images=FOLDER, a folder of images of its kind"
        ) from None


def _batches(images: list[Tensor], shapes: list[tuple[int, int, int]]) -> list[Tensor]:
    """Batches (B, C, h, w) of these shapes; what an image lacks is black."""
    batches = []
    for count, height, width in shapes:
        batch = torch.zeros(count, images[0].shape[0], height, width)
        for whole, image in zip(batch, images, strict=False):
            part = image[:, :height, :width]
            whole[:, : part.shape[1], : part.shape[2]] = part
        batches.append(batch)
    return batches


def _verify_torch(path: Path, segmenter: Segmenter, batches: list[Tensor]) -> Verified:
    with quiet():
        module = torch.export.load(path).module()
    return _compare(path.name, segmenter, batches, lambda image: module(image))


def _verify_onnx(path: Path, segmenter: Segmenter, batches: list[Tensor]) -> Verified:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def logits(image: Tensor) -> Tensor:
        return torch.from_numpy(session.run(["logits"], {"image": image.numpy()})[0])

    return _compare(path.name, segmenter, batches, logits)


@torch.no_grad()
def _compare(file: str, segmenter: Segmenter, batches: list[Tensor], logits: Any) -> Verified:  # noqa: ANN401
    difference, largest, same, pixels = 0.0, 0.0, 0, 0
    for image in batches:
        expected, got = segmenter.model(image), logits(image)
        difference = max(difference, float((expected - got).abs().max()))
        largest = max(largest, float(expected.abs().max()))
        same += int((expected.argmax(1) == got.argmax(1)).sum())
        pixels += expected[:, 0].numel()
    shapes = [list(image.shape) for image in batches]
    return Verified(file, shapes, difference, largest, same / pixels)
