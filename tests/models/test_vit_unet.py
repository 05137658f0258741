import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seg4k.errors import UserError
from seg4k.models.decoder import DecoderBlock, upsample_nearest
from seg4k.models.norm import GroupNorm2d
from seg4k.models.vit_unet import ViTUNet, build_model


def make(name="test_vit", size=(64, 96), classes=5, channels=3, norm="batch", stride=1, **encoder) -> ViTUNet:
    torch.manual_seed(0)
    config = {
        "encoder": {"name": name, "weights": "random", **encoder},
        "decoder": {"channels": [16, 16, 8, 8], "norm": norm},
        "head": {"stride": stride},
    }
    return build_model(config, num_classes=classes, image_size=size, in_channels=channels)


MODEL = make()


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 70), st.integers(1, 70), st.integers(1, 2))
def test_any_size_comes_back_at_its_size(height, width, batch):
    with torch.no_grad():
        logits = MODEL.eval()(torch.rand(batch, 3, height, width))
    assert logits.shape == (batch, 5, height, width)
    assert logits.isfinite().all()


@pytest.mark.parametrize(
    ("name", "patch"),
    [
        ("vit_tiny_patch16_224", 16),
        ("vit_small_patch8_224", 8),
        ("vit_small_patch14_dinov2", 14),
        ("vit_small_patch32_224", 32),
        ("vit_tiny_patch16_dinov3_qkvb", 16),
    ],
)
def test_every_patch_size_trains_on_sizes_that_do_not_divide(name, patch):
    model = make(name, size=(45, 75), channels=4, classes=3)
    logits = model(torch.rand(2, 4, 45, 75))
    assert logits.shape == (2, 3, 45, 75)
    logits.square().mean().backward()
    lacking = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    # A class token that nothing reads may go without; all else learns.
    assert not [name for name in lacking if "token" not in name]


def test_a_4k_height_is_padded_and_cropped_without_a_trace():
    # What lies below the image must not reach it otherwise than the convolutions' own zero padding would.
    model = make(size=(40, 64)).eval()
    image = torch.rand(1, 3, 40, 64)
    assert model.preprocess(image).shape == (1, 3, 48, 64)
    assert torch.equal(model.preprocess(image)[..., 40:, :], torch.zeros(1, 3, 8, 64))
    assert torch.equal(model(image), model.head(model.forward_features(image))[..., :40, :])


def test_input_is_normalised_by_the_encoders_mean_and_std_in_buffers():
    model = make()
    image = torch.randint(0, 256, (1, 3, 32, 32), dtype=torch.uint8)
    expected = (image / 255 - 0.5) / 0.5  # test_vit's own mean and std
    torch.testing.assert_close(model.preprocess(image), expected)
    assert torch.equal(model.preprocess(image), model.preprocess(image / 255))
    assert {"mean", "std"} <= dict(model.named_buffers()).keys() & model.state_dict().keys()


def test_wrong_images_are_refused():
    with pytest.raises(UserError, match="takes images"):
        make()(torch.rand(1, 4, 32, 32))
    with pytest.raises(UserError, match="uint8"):
        make()(torch.zeros(1, 3, 32, 32, dtype=torch.int32))


def test_segments_are_named_in_forward_order():
    model = make()
    names = list(model.segments())
    top = [name for name in names if name.count(".") < 2]
    assert top == [
        "encoder.patch_embed",
        *(f"encoder.stage{index}" for index in range(4)),
        "neck.stride16",
        "neck.stride8",
        "decoder.block0",
        "neck.stride4",
        "decoder.block1",
        "neck.stride2",
        "decoder.block2",
        "decoder.block3",
        "head",
    ]
    assert (
        names.index("encoder.stage0")
        < names.index("encoder.stage0.block0.attn")
        < names.index("encoder.stage1")
    )
    called = []
    for name, module in model.segments().items():
        module.register_forward_pre_hook(
            lambda m, args, kwargs, name=name: called.append((name, kwargs)), with_kwargs=True
        )
    model(torch.rand(1, 3, 32, 32))
    assert [name for name, _ in called] == names
    # Tensors must come as positional arguments: torch checks the versions of no others.
    assert not any(isinstance(value, torch.Tensor) for _, kwargs in called for value in kwargs.values())


def test_every_parameter_lies_in_a_segment():
    model = make()
    inside = {id(p) for module in model.segments().values() for p in module.parameters()}
    assert inside == {id(p) for p in model.parameters()}


@pytest.mark.parametrize("frozen", ["all", 2])
def test_frozen_stages_keep_nothing(frozen):
    model = make(frozen=frozen, drop_path=0.3).train()
    kept = {}

    def count(name, module):
        hooks = []

        def before(*_):
            hooks.append(
                torch.autograd.graph.saved_tensors_hooks(
                    lambda tensor: kept.__setitem__(name, kept.get(name, 0) + 1) or tensor,
                    lambda tensor: tensor,
                )
            )
            hooks[-1].__enter__()

        module.register_forward_pre_hook(before)
        module.register_forward_hook(lambda *_: hooks.pop().__exit__(None, None, None))

    names = ["encoder.patch_embed", *(f"encoder.stage{index}" for index in range(4))]
    for name in names:
        count(name, model.segments()[name])
    model(torch.rand(1, 3, 32, 32)).sum().backward()
    frozen_names = names if frozen == "all" else names[:3]
    assert kept.keys() == set(names) - set(frozen_names)
    gradients = {name for name, p in model.named_parameters() if p.grad is not None}
    assert not any(name.startswith("encoder.patch_embed") for name in gradients)
    assert any(name.startswith("decoder") for name in gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nearest_upsampling_stays_in_its_dtype_under_autocast(dtype):
    x = torch.randn(2, 3, 5, 7).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        y = upsample_nearest(x, 10, 14)
    assert y.dtype == dtype
    assert torch.equal(y, x.repeat_interleave(2, 2).repeat_interleave(2, 3))


def test_decoder_block_computes_what_smps_block_computes():
    torch.manual_seed(0)
    block = DecoderBlock(8, 4, 6, "batch")
    from segmentation_models_pytorch.decoders.unet.decoder import UnetDecoderBlock

    reference = UnetDecoderBlock(8, 4, 6)
    reference.conv1.load_state_dict(block.conv1.conv.state_dict())
    reference.conv2.load_state_dict(block.conv2.state_dict())
    x, skip = torch.randn(2, 8, 5, 4), torch.randn(2, 4, 9, 8)
    assert torch.equal(block(x, 9, 8, skip), reference(x, 9, 8, skip_connection=skip))


def test_group_norm_replaces_every_batch_norm_and_keeps_bf16():
    model = make(norm="group")
    assert not [m for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    norms = [m for m in model.modules() if isinstance(m, GroupNorm2d)]
    assert len(norms) == 2 * 4 + 1 + 1  # two a decoder block, one each in neck.stride4 and neck.stride2
    x = torch.randn(2, 16, 5, 5)
    norm = GroupNorm2d(16)
    with torch.autocast("cpu", torch.bfloat16):
        assert norm(x.bfloat16()).dtype == torch.bfloat16
    expected = torch.nn.functional.group_norm(x.double(), 16, eps=1e-5)
    torch.testing.assert_close(norm(x).double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("stride", [2, 4])
def test_a_head_of_greater_stride_upsamples_its_logits(stride):
    model = make(stride=stride).eval()
    image = torch.rand(1, 3, 45, 70)
    features = model.forward_features(image)
    assert features.shape[-2:] == (48 // stride, 80 // stride)
    expected = torch.nn.functional.interpolate(
        model.head(features).double(), size=(48, 80), mode="bilinear", align_corners=False
    )[..., :45, :70]
    torch.testing.assert_close(model(image).double(), expected, rtol=0, atol=1e-5)
    assert list(model.segments())[-2] == f"decoder.block{3 - stride // 2}.conv2"
    assert ("neck.stride2" in model.segments()) == (stride == 2)


def test_bad_settings():
    with pytest.raises(UserError, match=r"head.stride"):
        make(stride=8)
    with pytest.raises(UserError, match="norm=layer"):
        make(norm="layer")
