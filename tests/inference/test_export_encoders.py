"""Encoders whose sizes or embeddings are not those of a plain ViT with patches of 16 pixels."""

import numpy as np
import onnxruntime
import pytest
import timm
import torch
from torch import nn
from torch.nn import functional as F

from seg4k.data.classes import ClassTable
from seg4k.inference import export
from seg4k.inference.onnx_file import OPSET, quiet, save_onnx, translations
from seg4k.inference.segmenter import Segmenter
from seg4k.models.decoder import upsample_nearest
from seg4k.models.encoder import ViTEncoder
from seg4k.models.vit_unet import ViTUNet

SMALL = {"embed_dim": 48, "depth": 4, "num_heads": 2, "num_classes": 0, "dynamic_img_size": True}


def segmenter(name, size, **head):
    torch.manual_seed(0)
    vit = timm.create_model(name, img_size=size, **SMALL)
    model = ViTUNet(
        ViTEncoder(vit, (0.5,) * 3, (0.5,) * 3), 3, decoder_channels=(16, 16, 8, 8), **head
    ).eval()
    for parameter in model.parameters():  # so that every part of it can be seen in the logits
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5 if parameter.ndim > 1 else 1.0)
    config = {"data": {"image_size": list(size)}, "model": {"encoder": {"name": name}}}
    return Segmenter(model, ClassTable.from_names(["a", "b", "c"]), config, torch.device("cpu"), "fp32")


def difference(segmenter, program, path, shape):
    """Largest difference of a logit, as a share of the largest logit."""
    image = torch.rand(shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = segmenter.model(image)
        exported = program.module()(image)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (got,) = session.run(None, {"image": image.numpy()})
    largest = float(expected.abs().max())
    return [float((other - expected).abs().max()) / largest for other in (exported, torch.from_numpy(got))]


@pytest.mark.parametrize("stride", [1, 2, 4])
def test_patches_of_14_pixels(tmp_path, stride):
    made = segmenter("vit_small_patch14_dinov2", (70, 98), head_stride=stride)
    program, dynamic = export._program(made, None)
    assert dynamic
    save_onnx(tmp_path / "m.onnx", program, made, {})
    # In patches 5x7, 9x11, 9x13, 3x2 (whose neck needs no interpolation), 4x6 (whose logits need no crop).
    for shape in ((1, 3, 70, 98), (2, 3, 126, 154), (1, 3, 126, 182), (1, 3, 42, 28), (1, 3, 56, 84)):
        torch_share, onnx_share = difference(made, program, tmp_path / "m.onnx", shape)
        assert torch_share < 1e-5
        assert onnx_share < 1e-4


def test_rotary_embeddings(tmp_path, capsys):
    made = segmenter("vit_small_patch16_dinov3", (64, 96))
    program, dynamic = export._program(made, None)
    save_onnx(tmp_path / "m.onnx", program, made, {})
    shapes = [(1, 3, 64, 96), (2, 3, 96, 80)] if dynamic else [(1, 3, 64, 96), (3, 3, 64, 96)]
    for shape in shapes:
        torch_share, onnx_share = difference(made, program, tmp_path / "m.onnx", shape)
        assert torch_share < 1e-5
        assert onnx_share < 1e-4
    print(dynamic, capsys.readouterr().out)


class Upsample(nn.Module):
    def forward(self, x, y):
        return upsample_nearest(x, y.shape[0], y.shape[0])


def test_nearest_is_exported_with_the_rounding_of_torch(tmp_path):
    """Every length up to 80 and every larger one up to double."""
    dim, new = torch.export.Dim("n", min=2), torch.export.Dim("m", min=2)
    example = (torch.rand(1, 1, 7, 7), torch.rand(11))
    program = torch.export.export(Upsample(), example, dynamic_shapes=({2: dim, 3: dim}, {0: new}))
    exported = program.module()
    with quiet():
        torch.onnx.export(program, (), tmp_path / "u.onnx", dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(tmp_path / "u.onnx", providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]
    for length in range(2, 80, 3):
        x = torch.arange(length * length, dtype=torch.float32).view(1, 1, length, length)
        for longer in range(length, 2 * length + 1):
            expected = F.interpolate(x, size=(longer, longer), mode="nearest")
            assert torch.equal(upsample_nearest(x, longer, longer), expected)
            if longer % 3 == 0 or longer % 7 == 0:
                y = torch.zeros(longer)
                assert torch.equal(exported(x, y), expected)
                (got,) = session.run(None, {names[0]: x.numpy(), names[1]: y.numpy()})
                np.testing.assert_array_equal(got, expected.numpy())


class Divided(nn.Module):
    """Quotients of either sign of the lengths of x and y."""

    def forward(self, x, y):
        n, m = x.shape[0], y.shape[0]
        quotients = (n // 3, -(-n // 8), -n // m, n // -m, -n // -m, -100 // m, (n - m) // 2)
        return torch.stack([torch.scalar_tensor(quotient, dtype=torch.int64) for quotient in quotients])


def test_sizes_are_divided_as_python_divides_them(tmp_path):
    dims = tuple({0: torch.export.Dim(name)} for name in "nm")
    program = torch.export.export(Divided(), (torch.zeros(7), torch.zeros(11)), dynamic_shapes=dims)
    with quiet():
        torch.onnx.export(
            program,
            (),
            tmp_path / "d.onnx",
            dynamo=True,
            verbose=False,
            opset_version=OPSET,
            custom_translation_table=translations(),
        )
    session = onnxruntime.InferenceSession(tmp_path / "d.onnx", providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]
    for n in range(2, 40):
        for m in range(2, 40):
            x, y = np.zeros(n, np.float32), np.zeros(m, np.float32)
            (got,) = session.run(None, dict(zip(names, (x, y), strict=True)))
            assert got.tolist() == Divided()(x, y).tolist(), (n, m)
