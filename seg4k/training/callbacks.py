"""What is watched while a run trains: its speed, its memory, its progress."""

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar

from seg4k.memory.ledger import Ledger, Reading
from seg4k.memory.storages import own_part, static_bytes, storage_bytes
from seg4k.training.run_card import readable_bytes

WARMUP_STEPS = 3
LEDGER_STEPS = 2


class Stopwatch(Callback):
    """Seconds per optimizer step and the share of them spent waiting for data.

    The first `WARMUP_STEPS` steps of this process are left out, and the steps that the ledger measures on the
    CPU; validation lies outside, and what other callbacks do after a step, such as writing checkpoints: give
    the Trainer a `WaitBegins` as its last callback. On CUDA the device is waited for at each optimizer step,
    which costs nothing that matters at the size of step this is for.
    """

    def __init__(self, samples_per_step: int, resumed_step: int = 0) -> None:
        self.samples_per_step = samples_per_step
        self.warm = resumed_step + WARMUP_STEPS
        self.seconds: list[float] = []
        self.waits: list[float] = []
        self.skipped: set[int] = set()
        self._seconds = self._wait = 0.0
        self._mark: float | None = None

    @property
    def samples_per_second(self) -> float | None:
        """Median over the steps so far, None before the first that counts."""
        return self.samples_per_step / statistics.median(self.seconds) if self.seconds else None

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, index: int) -> None:  # noqa: ANN401
        """What has passed since the last batch ended was waiting for this one."""
        now = time.perf_counter()
        if self._mark is not None:
            self._wait += now - self._mark
            self._seconds += now - self._mark
        self._mark = now

    def on_train_batch_end(
        self,
        trainer: Trainer,
        module: LightningModule,
        outputs: Any,  # noqa: ANN401
        batch: Any,  # noqa: ANN401
        index: int,
    ) -> None:
        """Close a step where the optimizer has stepped."""
        stepped = not trainer.fit_loop._should_accumulate()
        if stepped and module.device.type == "cuda":
            torch.cuda.synchronize(module.device)
        assert self._mark is not None
        self._seconds += time.perf_counter() - self._mark
        self._mark = None
        if stepped:
            if trainer.global_step > self.warm and trainer.global_step not in self.skipped:
                self.seconds.append(self._seconds)
                self.waits.append(self._wait)
            self._seconds = self._wait = 0.0

    def wait_begins(self) -> None:
        """From here on the next batch is waited for."""
        self._mark = time.perf_counter()

    def on_validation_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Do not count validation."""
        self._mark = None

    def figures(self) -> dict[str, float | int | None]:
        """The `throughput` of the run card."""
        total = sum(self.seconds)
        return {
            "samples_per_second": self.samples_per_second,
            "step_seconds_median": statistics.median(self.seconds) if self.seconds else None,
            "warmup_steps": WARMUP_STEPS,
            "data_wait_fraction": sum(self.waits) / total if total else None,
        }


class WaitBegins(Callback):
    """Tells the stopwatch that all is done for a batch; to be the last callback."""

    def __init__(self, stopwatch: Stopwatch) -> None:
        self.stopwatch = stopwatch

    def on_train_batch_end(
        self,
        trainer: Trainer,
        module: LightningModule,
        outputs: Any,  # noqa: ANN401
        batch: Any,  # noqa: ANN401
        index: int,
    ) -> None:
        """The next thing is the next batch, or a validation."""
        self.stopwatch.wait_begins()


class MemoryWatch(Callback):
    """Drives the ledger: on CUDA over the whole run, on the CPU over `LEDGER_STEPS` steps after warm-up.

    A run too short for a warm-up, or one that goes on with too few steps left, is measured on the first ones
    that it does.
    """

    def __init__(self, stopwatch: Stopwatch, max_steps: int, resumed_step: int = 0) -> None:
        self.stopwatch = stopwatch
        self.resumed_step = resumed_step
        self.first = resumed_step + min(WARMUP_STEPS, max(0, max_steps - resumed_step - LEDGER_STEPS))
        self.measured = range(self.first, self.first + LEDGER_STEPS)
        stopwatch.skipped.update(step + 1 for step in self.measured)
        self.ledger: Ledger | None = None
        self.static_bytes: int | None = None
        self.static_parts: dict[str, int] = {}

    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Forget the peaks of whatever this process did before."""
        self.ledger = Ledger(module.device)
        self.ledger.reset()

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, index: int) -> None:  # noqa: ANN401
        """Open the window before the first step to be measured; batches made by workers are held by hand."""
        assert self.ledger is not None
        if trainer.global_step in self.measured:
            self.ledger.start()
            self.ledger.hold(batch)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        module: LightningModule,
        outputs: Any,  # noqa: ANN401
        batch: Any,  # noqa: ANN401
        index: int,
    ) -> None:
        """Close the window after the last step to be measured; add up what is static after the first.

        The optimizer has its state by then, and its gradients live on until the next step's backward.
        """
        assert self.ledger is not None
        if self.static_bytes is None and trainer.global_step > self.resumed_step:
            self.static_bytes = static_bytes([module], trainer.optimizers)
            parameters = storage_bytes([*module.parameters(), *module.buffers()])
            gradients = sum(
                own_part(p).numel() * p.element_size() for p in module.parameters() if p.requires_grad
            )
            self.static_parts = {
                "parameters": parameters,
                "gradients": gradients,
                "optimizer": self.static_bytes - parameters - gradients,
            }
        if self.ledger.is_open and trainer.global_step >= self.measured.stop:
            self.close()

    def on_exception(self, trainer: Trainer, module: LightningModule, exception: BaseException) -> None:
        """Leave no profiler running."""
        self.close()

    def on_fit_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Leave no profiler running."""
        self.close()

    def close(self) -> None:
        """Close an open window."""
        if self.ledger is not None and self.ledger.is_open:
            self.ledger.stop()

    def breakdown(self) -> dict[str, int] | None:
        """What the peak is made of; all that is not static is activations. None where it was not measured."""
        peak = self.reading().peak_bytes
        if peak is None or self.static_bytes is None:
            return None
        return {**self.static_parts, "activations": max(0, peak - self.static_bytes)}

    def figures(self) -> dict[str, Any]:
        """The `memory` of the run card, as far as it is measured, of this process."""
        reading = self.reading()
        return {
            "peak_bytes": reading.peak_bytes,
            "peak_source": reading.peak_source,
            "reserved_bytes": reading.reserved_bytes,
            "static_bytes": self.static_bytes,
            "breakdown": self.breakdown(),
        }

    def reading(self) -> Reading:
        """What was measured so far."""
        self.close()
        return self.ledger.reading() if self.ledger is not None else Reading(None, "cpu_allocator", None)


def largest_peak(figures: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of the figures of every process those of the one with the largest peak, and the peaks of all.

    What has to fit is the device that needs most.
    """
    peaks = [one["peak_bytes"] for one in figures]
    largest = max(range(len(peaks)), key=lambda rank: peaks[rank] or 0)
    return {**figures[largest], "peak_bytes_per_rank": peaks}


def live_figures(stopwatch: Stopwatch, memory: MemoryWatch) -> dict[str, str]:
    """Speed and memory in a few characters, for a progress display."""
    figures = {}
    if (speed := stopwatch.samples_per_second) is not None:
        figures["samples/s"] = f"{speed:.3g}"
    if memory.ledger is not None and not memory.ledger.is_open:
        peak = memory.ledger.reading().peak_bytes
        if peak:
            figures["peak"] = readable_bytes(peak)
    return figures


class ProgressBar(RichProgressBar):
    """Lightning's rich bar with samples/s and peak memory beside loss and mIoU."""

    def __init__(self, stopwatch: Stopwatch, memory: MemoryWatch) -> None:
        super().__init__(leave=False)
        self.stopwatch = stopwatch
        self.memory = memory

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Optimizer steps, loss, mIoU, samples/s, peak."""
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        steps = {"step": f"{trainer.global_step}/{trainer.max_steps}"}
        return {**steps, **metrics, **live_figures(self.stopwatch, self.memory)}

    def _get_train_description(self, current_epoch: int) -> str:
        # Lightning's own counts to max_epochs, which is -1 here: a run is as long as its steps.
        return f"Epoch {current_epoch}".ljust(len(self.validation_description))


class ProgressLines(Callback):
    """One line each few steps, for a log file or a scheduler's output, where a bar would only be noise."""

    def __init__(self, stopwatch: Stopwatch, memory: MemoryWatch, every_steps: int) -> None:
        self.stopwatch = stopwatch
        self.memory = memory
        self.every_steps = every_steps
        self._printed = 0

    def on_train_batch_end(
        self,
        trainer: Trainer,
        module: LightningModule,
        outputs: Any,  # noqa: ANN401
        batch: Any,  # noqa: ANN401
        index: int,
    ) -> None:
        """Print where a multiple of `every_steps` was reached."""
        step = trainer.global_step
        if trainer.is_global_zero and step % self.every_steps == 0 and step != self._printed:
            self._printed = step
            metrics = {
                name: f"{float(value):.4f}"
                for name, value in trainer.progress_bar_metrics.items()
                if name != "v_num"
            }
            figures = {**metrics, **live_figures(self.stopwatch, self.memory)}
            print(
                f"step {step}/{trainer.max_steps}  "
                + "  ".join(f"{key} {value}" for key, value in figures.items()),
                flush=True,
            )
