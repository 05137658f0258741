"""AdamW with moments in 8 bits, from torchao, and its state in checkpoints as plain tensors."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from seg4k.errors import UserError

MARK = "seg4k_8bit"
# As torchao has them: one scale for a block, and small tensors stay as they are.
BLOCK, SMALLEST = 256, 4096


def adamw_8bit(
    groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float]
) -> torch.optim.Optimizer:
    """Make the optimizer (Dettmers et al. 2021, https://arxiv.org/abs/2110.02861, block-wise quantisation).

    On a GPU torchao compiles its step, once for each shape of parameter. On the CPU it runs as it is: there
    it takes longer to compile than to run, and needs a C++ compiler.

    Raises:
        UserError: torchao is not installed.
    """
    try:
        from torchao.optim import AdamW8bit  # type: ignore[import-untyped, unused-ignore]
    except ImportError as error:
        raise UserError(
            "optimizer=adamw_8bit: torchao is not installed; pip install 'seg4k[8bit]'"
        ) from error

    class AdamW(AdamW8bit):  # type: ignore[misc, unused-ignore]
        def step(self, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401 - as torch's
            loss = None
            if closure is not None:  # forward and backward, which may be compiled
                with torch.enable_grad():
                    loss = closure()
            if self.param_groups[0]["params"][0].device.type == "cpu":
                with torch.compiler.set_stance("force_eager"):
                    super().step()
            else:
                super().step()
            return loss

    optimizer: torch.optim.Optimizer = AdamW(groups, lr=lr, betas=betas)
    return optimizer


class Footprint(torch.optim.Optimizer):
    """Holds what `adamw_8bit` holds and computes nothing: for a trace, which torchao's step cannot be in."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ANN401 - as torch's
        """Make the state, once."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None or self.state[parameter]:
                    continue
                for name in ("exp_avg", "exp_avg_sq"):
                    self.state[parameter][name] = self._moment(parameter)

    @staticmethod
    def _moment(parameter: torch.Tensor) -> list[torch.Tensor]:
        size = parameter.numel()
        if size < SMALLEST or size % BLOCK:
            return [torch.zeros_like(parameter)]
        return [torch.zeros_like(parameter, dtype=torch.uint8), parameter.new_zeros(size // BLOCK)]


def to_plain(state: Any) -> Any:  # noqa: ANN401 - any nesting
    """Optimizer state with each quantised tensor as a mapping of plain ones.

    A checkpoint then loads without torchao, and runs no code of it.
    """
    if isinstance(state, Mapping):
        return {key: to_plain(value) for key, value in state.items()}
    if isinstance(state, list):
        return [to_plain(value) for value in state]
    if type(state).__name__ != "OptimState8bit":
        return state
    return {
        MARK: True,
        "codes": state.codes,
        "scale": state.scale,
        "qmap": state.qmap,
        "signed": bool(state.signed),
        "dtype": str(state.dtype).removeprefix("torch."),
    }


def from_plain(state: Any) -> Any:  # noqa: ANN401 - any nesting
    """What `to_plain` was given.

    Raises:
        UserError: torchao is not installed.
    """
    if isinstance(state, list):
        return [from_plain(value) for value in state]
    if not isinstance(state, Mapping):
        return state
    if MARK not in state:
        return {key: from_plain(value) for key, value in state.items()}
    try:
        from torchao.optim.subclass_8bit import OptimState8bit  # type: ignore[import-untyped, unused-ignore]
    except ImportError as error:
        raise UserError(
            "the checkpoint has the state of optimizer=adamw_8bit, and torchao is not installed; "
            "pip install 'seg4k[8bit]'"
        ) from error
    dtype = getattr(torch, state["dtype"])
    return OptimState8bit(state["codes"], state["scale"], state["qmap"], state["signed"], dtype)
