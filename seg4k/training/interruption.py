"""Being told to end: SIGTERM (a scheduler, a spot machine) and SIGUSR1 (SLURM's early warning).

The signal is noted, and the processes agree on it at the end of an optimizer step, or between two batches of
a validation. They write a checkpoint and end with status 143, which is 128 + SIGTERM: schedulers take it for
"ended by the signal", and `resume=auto` with the same run directory goes on from there. Before training has
begun there is nothing to save, and the process ends at once.

Ctrl-C (SIGINT) ends a run at once, in the middle of a step: the checkpoints that are there stay.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
STATUS = 143


class Terminated(SystemExit):
    """Ends the process with status 143."""

    def __init__(self, reason: str) -> None:
        super().__init__(STATUS)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class Interruption(Callback):
    """Notes the signals while its block runs; a callback, since Lightning installs handlers of its own."""

    def __init__(self) -> None:
        self.received: int | None = None
        self.deferred = False
        self._before: dict[int, Any] = {}
        self._ctrl_c = signal.getsignal(signal.SIGINT)

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.getsignal(number) for number in SIGNALS}
            self._install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def ctrl_c(self) -> Iterator[None]:
        """Let KeyboardInterrupt through, of which Lightning makes an exit with status 1."""
        try:
            yield
        except SystemExit as error:
            if isinstance(error.__context__, KeyboardInterrupt):
                raise KeyboardInterrupt from None
            raise

    def allow_ctrl_c(self) -> None:
        """Undo that Lightning ignores Ctrl-C for good, once it has come; when the run has cleaned up."""
        if threading.current_thread() is threading.main_thread() and self._ctrl_c is not None:
            signal.signal(signal.SIGINT, self._ctrl_c)

    def _install(self) -> None:
        for number in self._before:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        if not self.deferred:
            raise self.ending("before training began")

    def requested(self) -> bool:
        """Whether a signal has come."""
        return self.received is not None

    def ending(self, when: str) -> Terminated:
        """What to raise."""
        name = (
            signal.Signals(self.received).name if self.received is not None else "a signal to another process"
        )
        return Terminated(f"{name} {when}")

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        """From here on an optimizer step is finished first."""
        self.deferred = True
        self._install()

    def on_validation_start(self, trainer: Trainer, module: LightningModule) -> None:
        """A validation after training has Lightning's handlers again."""
        self.deferred = True
        self._install()

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        module: LightningModule,
        outputs: Any,  # noqa: ANN401
        batch: Any,  # noqa: ANN401
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Validation need not be finished: what it looks at was saved before it, and it is done again."""
        asked = self.requested()
        if trainer.world_size > 1:
            flag = torch.tensor(float(asked), device=module.device)
            torch.distributed.all_reduce(flag)
            asked = bool(flag > 0)
        if asked:
            raise self.ending(f"in the validation of step {trainer.global_step}")
