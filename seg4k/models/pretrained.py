"""Where an encoder's weights come from: timm's hub, or a file; never silently from nowhere."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from seg4k.errors import UserError

# What files hold beside an encoder: heads of classification and of pre-training, with their norms.
_BESIDE = ("head", "fc_norm", "attn_pool", "mask_token", "lm_head", "decoder_")


def pretrained(name: str, arguments: Mapping[str, Any]) -> nn.Module:
    """Make timm's pretrained model, or raise with the two ways on; never silent random weights."""
    import timm

    try:
        return timm.create_model(name, pretrained=True, **arguments)
    except Exception as error:  # the hub client raises its own, requests' or OS errors, by version
        raise UserError(
            f"model.encoder.weights=pretrained: the weights of {name} could not be had "
            f"({type(error).__name__}: {str(error).partition(chr(10))[0]}). Two ways on: fetch them where "
            "there is a network and give the file, model.encoder.weights=/path/to/model.safetensors; or train"
            " from scratch, model.encoder.weights=random."
        ) from error


def load_timm_weights(vit: nn.Module, path: Path) -> None:
    """Load a weights file of the same architecture; position embeddings are resampled to the model's size.

    No code in the file is run: `.safetensors`, or a `.pth` read with `weights_only`.

    Raises:
        UserError: no such file, not a weights file, or weights of another architecture.
    """
    from timm.models._manipulate import adapt_input_conv
    from timm.models.eva import Eva
    from timm.models.eva import checkpoint_filter_fn as filter_eva
    from timm.models.vision_transformer import checkpoint_filter_fn as filter_vit

    where = f"model.encoder.weights={path}"
    if not path.is_file():
        raise UserError(f"{where}: no such file. Give pretrained, random, or a .safetensors or .pth file.")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            state: Any = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # each format has its own errors
        raise UserError(
            f"{where}: not a weights file that can be read safely ({type(error).__name__}). "
            "Save it as .safetensors, or as a state_dict with torch.save."
        ) from error
    if not isinstance(state, Mapping):
        raise UserError(
            f"{where}: it holds a {type(state).__name__}, not a state_dict (names and tensors). "
            "Save model.state_dict()."
        )
    for wrapper in ("state_dict", "model"):
        if isinstance(state.get(wrapper), Mapping):
            state = dict(state[wrapper])
    own = vit.state_dict()
    try:
        state = (filter_eva if isinstance(vit, Eva) else filter_vit)(state, cast(Any, vit))
        kernel = "patch_embed.proj.weight"
        if kernel in state and state[kernel].shape[1] != own[kernel].shape[1]:
            state[kernel] = adapt_input_conv(own[kernel].shape[1], state[kernel])
        missing = [
            key for key in own if key not in state and not key.startswith(("head", "fc_norm", "attn_pool"))
        ]
        if missing:
            raise KeyError(f"it lacks {len(missing)} of {len(own)} tensors, the first {missing[0]}")
        beside = (
            _BESIDE if "norm.weight" in own else (*_BESIDE, "norm.")
        )  # a model that pools first has fc_norm
        surplus = [key for key in state if key not in own and not key.startswith(beside)]
        if surplus:
            raise KeyError(f"it holds {len(surplus)} tensors too many, the first {surplus[0]}")
        vit.load_state_dict(state, strict=False)
    # What timm and torch raise for weights of another architecture: a name they look for (KeyError), a value
    # that is no tensor (AttributeError), and shapes that differ or cannot be adapted (RuntimeError).
    except (KeyError, RuntimeError, AttributeError) as error:
        reason = str(error.args[0]).strip().splitlines()[-1].strip()
        raise UserError(
            f"{where}: these are weights of another architecture than "
            f"{cast(Any, vit).default_cfg['architecture']}: {reason}. "
            "Set model.encoder.name to the one they were saved from."
        ) from error
