"""An exported file against the model it was made of, on real images."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seg4k.data.build import build_datamodule
from seg4k.data.images import Image, grey_to_rgb, list_images, read_image
from seg4k.data.samples import to_sample
from seg4k.data.scenes import Window, crop, read_window
from seg4k.errors import UserError
from seg4k.inference.evaluate import data_settings
from seg4k.inference.memory import free_bytes
from seg4k.inference.onnx_file import quiet
from seg4k.inference.segmenter import Segmenter

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


def check_count(count: object) -> None:
    """Refuse a number of images that is none."""
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise UserError(f"count={count}: give a whole number from 1 up")


def shapes_to_verify(
    segmenter: Segmenter, fixed: tuple[int, int] | None, count: int
) -> list[tuple[int, int, int]]:
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
    height, width = whole_patches(segmenter, segmenter.config["data"]["image_size"])
    down, across = height // rows, width // columns
    shrink = min(1.0, (LARGEST_TOKENS / 4 / (down * across)) ** 0.5)
    small = max(2, int(down * shrink)) * rows, max(2, int(across * shrink)) * columns
    return [(1, 2 * small[0], 2 * small[1]), (count, *small)]


def check_onnx_fits(segmenter: Segmenter, size: tuple[int, int]) -> None:
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


def whole_patches(segmenter: Segmenter, size: Any) -> tuple[int, int]:  # noqa: ANN401 - a pair of numbers
    """The height and width of most whole patches within a size, two of them at least."""
    rows, columns = segmenter.model.encoder.patch_size
    return max(2, int(size[0]) // rows) * rows, max(2, int(size[1]) // columns) * columns


def images_to_verify(
    segmenter: Segmenter, source: str | None, shapes: list[tuple[int, int, int]]
) -> list[Tensor]:
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


def batches_of(images: list[Tensor], shapes: list[tuple[int, int, int]]) -> list[Tensor]:
    """Batches (B, C, h, w) of these shapes; what an image lacks is black."""
    batches = []
    for count, height, width in shapes:
        batch = torch.zeros(count, images[0].shape[0], height, width)
        for whole, image in zip(batch, images, strict=False):
            part = image[:, :height, :width]
            whole[:, : part.shape[1], : part.shape[2]] = part
        batches.append(batch)
    return batches


def verify_torch(path: Path, segmenter: Segmenter, batches: list[Tensor]) -> Verified:
    """Compare a file of torch.export with the model."""
    with quiet():
        module = torch.export.load(path).module()
    return _compare(path.name, segmenter, batches, lambda image: module(image))


def verify_onnx(path: Path, segmenter: Segmenter, batches: list[Tensor]) -> Verified:
    """Compare an ONNX file, run by onnxruntime on the CPU, with the model."""
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
