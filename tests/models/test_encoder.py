import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.layers import resample_abs_pos_embed
from torch import nn

from seg4k.errors import UserError
from seg4k.models.encoder import STAGES, ViTEncoder, build_encoder

SIZE = (48, 80)


def tokens_of(encoder: ViTEncoder, image: torch.Tensor) -> torch.Tensor:
    grid = (image.shape[-2] // encoder.patch_size[0], image.shape[-1] // encoder.patch_size[1])
    rope = encoder.rotary_embedding(grid)
    tokens = encoder.patch_embed(image)
    for stage in encoder.stages:
        tokens = stage(tokens, rope)
    return tokens


@pytest.mark.parametrize(
    "name",
    [
        "test_vit",  # 6 blocks: stages of unequal length
        "test_vit3",
        "vit_tiny_patch16_dinov3_qkvb",  # rotary, registers, no absolute position embedding
        "eva02_tiny_patch14_224",  # rotary and absolute
        "vit_small_patch16_rope_mixed_224",  # learned frequencies, one rotary embedding a block
    ],
)
@pytest.mark.parametrize("size", [(56, 112), (84, 70)], ids=["built-for", "another"])
def test_regrouped_blocks_compute_what_timm_computes(name, size):
    torch.manual_seed(0)
    reference = timm.create_model(name, num_classes=0, img_size=(56, 112), dynamic_img_size=True).eval()
    patch = reference.patch_embed.patch_size[0]
    size = tuple(side // 14 * patch for side in size)
    torch.manual_seed(0)
    reference = timm.create_model(
        name, num_classes=0, img_size=(56 // 14 * patch, 112 // 14 * patch), dynamic_img_size=True
    ).eval()
    vit = timm.create_model(
        name, num_classes=0, img_size=(56 // 14 * patch, 112 // 14 * patch), dynamic_img_size=True
    )
    vit.load_state_dict(reference.state_dict())
    encoder = ViTEncoder(vit, (0.5,) * 3, (0.5,) * 3).eval()
    image = torch.randn(2, 3, *size)
    expected = reference.forward_features(image)
    if isinstance(reference.norm, nn.Identity):
        expected = reference.fc_norm(expected)
    assert torch.equal(tokens_of(encoder, image), expected)


def test_stages_hold_every_block_once():
    encoder = build_encoder("test_vit", weights="random", image_size=SIZE)
    assert [len(stage.blocks) for stage in encoder.stages] == [2, 1, 1, 2]
    assert encoder.depth == 6
    assert [stage.first for stage in encoder.stages] == [0, 2, 3, 4]


def test_position_embedding_of_a_wide_image_is_resampled_by_weights_once(tmp_path, monkeypatch):
    square = timm.create_model("test_vit", num_classes=0)
    save_file(square.state_dict(), tmp_path / "w.safetensors")
    encoder = build_encoder("test_vit", weights=str(tmp_path / "w.safetensors"), image_size=(1080, 1920))
    expected = resample_abs_pos_embed(
        square.pos_embed, new_size=(68, 120), old_size=square.patch_embed.grid_size, num_prefix_tokens=1
    )
    torch.testing.assert_close(encoder.patch_embed.stem.pos_embed, expected, rtol=0, atol=1e-6)

    calls = []
    interpolate = torch.nn.functional.interpolate
    monkeypatch.setattr(
        torch.nn.functional, "interpolate", lambda *a, **k: calls.append(1) or interpolate(*a, **k)
    )
    encoder.patch_embed(torch.zeros(1, 3, 1088, 1920))
    assert not calls
    encoder.patch_embed(torch.zeros(1, 3, 1088, 960))
    assert calls


@pytest.mark.parametrize("frozen", ["all", 1, 2])
def test_frozen_stages_take_no_gradient_and_stay_in_eval_mode(frozen):
    encoder = build_encoder(
        "test_vit", weights="random", image_size=SIZE, frozen=frozen, drop_path=0.5
    ).train()
    number = STAGES if frozen == "all" else frozen
    for index, stage in enumerate(encoder.stages):
        assert all(parameter.requires_grad == (index >= number) for parameter in stage.parameters())
        assert stage.training == (index >= number)
        assert all(block.training == (index >= number) for block in stage.blocks)
    assert not any(parameter.requires_grad for parameter in encoder.patch_embed.parameters())


def test_depth_counts_from_the_embedding_to_the_last_block():
    encoder = build_encoder("test_vit", weights="random", image_size=SIZE)
    depths = {name: encoder.depth_of(name) for name, _ in encoder.named_parameters()}
    assert depths["patch_embed.stem.pos_embed"] == 0
    assert depths["stages.0.blocks.0.norm1.weight"] == 1
    assert depths["stages.2.blocks.0.norm1.weight"] == 4
    assert depths["stages.3.norm.weight"] == 6
    assert max(depths.values()) == 6


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@pytest.mark.parametrize("channels", [3, 5])
def test_weights_of_a_file(tmp_path, suffix, channels):
    source = timm.create_model("test_vit", num_classes=7)
    path = tmp_path / f"weights{suffix}"
    if suffix == ".pth":
        torch.save({"state_dict": source.state_dict()}, path)
    else:
        save_file(source.state_dict(), path)
    encoder = build_encoder("test_vit", weights=str(path), image_size=(160, 160), in_channels=channels)
    block = encoder.stages[0].blocks[0]
    assert torch.equal(block.attn.qkv.weight, source.blocks[0].attn.qkv.weight)
    assert encoder.patch_embed.stem.patch_embed.proj.weight.shape[1] == channels
    assert len(encoder.mean) == channels


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("vit_tiny_patch16_224", {"depth": 14}),  # deeper
        ("vit_tiny_patch16_224", {"init_values": 1e-5}),  # LayerScale
        ("vit_tiny_patch16_224", {"qk_norm": True}),
        ("vit_small_patch16_dinov3_qkvb", {}),  # biases
    ],
)
def test_weights_of_a_larger_architecture_are_refused(tmp_path, name, other):
    torch.save(timm.create_model(name, **other).state_dict(), tmp_path / "weights.pth")
    with pytest.raises(UserError, match=r"another architecture than \w+: it holds \d+ tensors too many"):
        build_encoder(name.removesuffix("_qkvb"), weights=str(tmp_path / "weights.pth"), image_size=SIZE)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("vit_tiny_patch16_224", {}),  # with its classifier
        ("deit_tiny_distilled_patch16_224", {}),  # with two
        ("vit_medium_patch16_gap_256", {}),  # with fc_norm in place of norm ...
        ("vit_medium_patch16_gap_256", {"fc_norm": False}),  # ... and with norm in place of fc_norm
        ("vit_tiny_patch16_dinov3_qkvb", {}),
        ("eva02_tiny_patch14_224", {"num_classes": 5}),
        ("vit_medium_patch16_rope_reg1_gap_256", {}),
    ],
)
def test_weights_of_the_same_architecture_load_whatever_their_head(tmp_path, name, other):
    source = timm.create_model(name, **other)
    torch.save(source.state_dict(), tmp_path / "weights.pth")
    encoder = build_encoder(name, weights=str(tmp_path / "weights.pth"), image_size=SIZE)
    taken, given = encoder.stages[3].blocks[-1].state_dict(), source.blocks[-1].state_dict()
    assert all(torch.equal(taken[key], given[key]) for key in taken)


class Trap:
    def __reduce__(self):
        return (pytest.fail, ("code from a weights file was run",))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "no such file"),
        (lambda path: path.write_bytes(b"not weights"), "cannot be|can be read safely"),
        (lambda path: torch.save({"state_dict": Trap()}, path), "can be read safely"),
        (lambda path: torch.save(timm.create_model("test_vit3").state_dict(), path), "another architecture"),
        (lambda path: torch.save({"a": torch.zeros(1)}, path), "another architecture"),
        (lambda path: torch.save([torch.zeros(1)], path), "holds a list, not a state_dict"),
    ],
)
def test_bad_weights_files(tmp_path, make, message):
    make(tmp_path / "weights.pth")
    with pytest.raises(UserError, match=message):
        build_encoder("test_vit", weights=str(tmp_path / "weights.pth"), image_size=SIZE)


def test_pretrained_without_a_hub_gives_the_two_ways_on(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=r"weights=/path.*weights=random"):
        build_encoder("vit_tiny_patch16_224", weights="pretrained", image_size=SIZE)


@pytest.mark.parametrize(
    ("name", "message"),
    [("vit_tiny_patch16_225", "vit_tiny_patch16_224"), ("resnet18", "not a plain vision transformer")],
)
def test_unsuited_names(name, message):
    with pytest.raises(UserError, match=message):
        build_encoder(name, weights="random", image_size=SIZE)


@pytest.mark.parametrize("frozen", [5, -1, "some", True])
def test_frozen_is_none_all_or_a_number_of_stages(frozen):
    with pytest.raises(UserError, match="frozen"):
        build_encoder("test_vit", weights="random", image_size=SIZE, frozen=frozen)
