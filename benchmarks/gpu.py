"""The check on a GPU: experiment=vitb_4k's model under every mode, predicted and measured.

python benchmarks/gpu.py --out benchmarks/results/suite_gpu.json    one large GPU, at most eight minutes
python benchmarks/gpu.py --dry-run     every code path at a tiny size on the CPU: seconds

Needs nothing from the network. Running out of memory is a row; what the machine lacks is skipped by name;
when the time is up, what is left is skipped and the tables are printed all the same.
"""

import argparse
import gc
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from peer_models import Work, adamw, seg4k_model, seg4k_step, step_of

from seg4k.activation_checkpointing import apply_activation_checkpointing, make_plan
from seg4k.memory.auto import AutoPlanner
from seg4k.memory.ledger import measure_cpu_peak
from seg4k.memory.step import autocast
from seg4k.memory.tracer import Tracer
from seg4k.studies.speed import interleaved_timing

GIB, MIB = 2**30, 2**20
MODES = ("none", "stage", "block", "layer", "selective")
RESERVE = GIB  # of a card's memory, for context, libraries and fragmentation


@dataclass(frozen=True)
class Settings:
    """Sizes of the check.

    Attributes:
        work: the training step.
        batches: that every mode is measured at.
        budgets: of mode auto, by name, in bytes of tensors.
        agreement: side of the image for gradients in fp32.
        parity: side of the image, and steps, for losses in mixed precision.
        card: memory, in bytes, within which the largest batch is sought, and the reserve out of it.
        seconds: all the time there is.
    """

    device: str
    work: Work
    batches: tuple[int, ...]
    budgets: dict[str, int]
    agreement: int
    parity: tuple[int, int]
    card: tuple[int, int]
    repeats: int
    seconds: float


FULL = Settings(
    "cuda",
    Work("vit_base_patch16_224", 2160, 3840),
    (1, 2, 4),
    {"auto, 24 GiB": 24 * GIB, "auto, 8 GiB": 8 * GIB},
    512,
    (1024, 20),
    (24 * GIB, RESERVE),
    5,
    450.0,
)
DRY = Settings(
    "cpu",
    Work("test_vit", 64, 96, classes=3, channels=(16, 16, 8, 8)),
    (1, 2),
    {"auto, 24 GiB": 24 * GIB, "auto, 1 MiB": MIB},
    32,
    (32, 2),
    (10 * MIB, MIB),
    1,
    170.0,
)


class TimeIsUp(BaseException):  # so that no library takes it for an error of its own
    """The deadline has come."""


class Check:
    """One run of the check: what was found so far, and the time that is left."""

    def __init__(self, settings):
        self.settings = settings
        self.deadline = time.monotonic() + settings.seconds
        self.found = {"rows": [], "agreement": [], "parity": [], "largest": [], "skipped": []}
        self.predictions = {}
        self._threads = []

    def left(self):
        return self.deadline - time.monotonic()

    def section(self, name, part, *arguments):
        """Run a part of the check: what fails or comes too late is told, and the rest goes on."""
        start = time.monotonic()
        if self.left() <= 0:
            self.skip(name, "the time was up")
            return
        try:
            part(*arguments)
        except TimeIsUp:
            self.skip(name, "the time was up")
        except Exception as error:
            self.skip(name, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        finally:
            free_memory()
            print(f"gpu: {name}: {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)

    def skip(self, name, why):
        self.found["skipped"].append({"name": name, "why": why})

    def start_predictions(self):
        """Trace every batch in processes of their own, while the GPU works."""
        if self.left() < 5:
            self.skip("predictions", "the time was up")
            return
        for batch in self.settings.batches:
            thread = threading.Thread(target=self._predict, args=(batch,), daemon=True)
            thread.start()
            self._threads.append(thread)

    def _predict(self, batch):
        settings = self.settings
        rules = "cuda" if settings.device == "cuda" else "cpu"
        found = {}
        try:
            with Tracer(
                seg4k_step, replace(settings.work, batch=batch), "bf16", "strips", rules=rules
            ) as tracer:
                for mode in MODES:
                    plan = make_plan(mode, tracer.segment_names)
                    found[mode] = (plan, tracer.trace(plan).peak_bytes)
                planner = AutoPlanner(tracer, fast_device())
                for name, budget in settings.budgets.items():
                    step = planner.at(budget)
                    found[name] = (step.plan, step.trace.peak_bytes) if step else None
        except Exception as error:
            self.skip(f"prediction at batch {batch}", f"{type(error).__name__}: {str(error)[-200:]}")
        self.predictions[batch] = found

    def wait_for_predictions(self):
        """Until they are there, or half of the time that is left is gone."""
        until = time.monotonic() + self.left() / 2
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))


def fast_device():
    """Figures by which auto weighs time: those of an H100 for any large GPU."""
    from peers_4k import device_named

    return device_named("h100")


def free_memory():
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Trainee:
    """The model of the check on its device, with an optimizer and a batch."""

    def __init__(self, settings, work, precision="bf16", loss="strips"):
        self.device, self.precision = settings.device, precision
        with torch.device(settings.device):
            self.model = seg4k_model(work)
        self.optimizer = adamw(self.model)
        self.step_of = step_of(self.model, work, precision, loss)
        for module in self.step_of.modules:
            module.to(settings.device)
        generator = torch.Generator().manual_seed(1)
        size = (work.batch, 3, work.height, work.width)
        image = torch.randint(256, size, dtype=torch.uint8, generator=generator)
        mask = torch.randint(work.classes, (work.batch, *size[2:]), generator=generator)
        self.batch = {"image": image.to(settings.device), "mask": mask.to(settings.device)}

    def plan(self, plan):
        apply_activation_checkpointing(self.model.train(), plan, audit="off")

    def backward(self):
        with autocast(self.precision, self.device):
            loss = self.step_of.loss(self.model, self.batch)
        self.optimizer.zero_grad()
        loss.backward()
        return loss.detach()

    def step(self):
        loss = self.backward()
        self.optimizer.step()
        return loss

    def peak(self):
        """Bytes held by tensors at the peak of a step, and bytes the allocator took."""
        if self.device == "cpu":
            roots = [self.model, self.optimizer, *self.step_of.modules, self.batch]
            return measure_cpu_peak(self.step, steps=1, roots=roots), None
        self.step()
        torch.cuda.synchronize()
        free_memory()
        torch.cuda.reset_peak_memory_stats()
        self.step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def out_of_memory(error):
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


# What cuDNN and cuBLAS say where there is no room left for their workspaces.
NO_ROOM = ("unable to find an engine", "CUDNN_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_ALLOC_FAILED")


def no_room(error):
    """Whether a step failed for want of memory, near a limit: the allocator's word, or a library's."""
    return out_of_memory(error) or any(words in str(error) for words in NO_ROOM)


def modes_at(check, batch):
    """Peak, speed and prediction of every mode at one batch."""
    settings = check.settings
    trainee = Trainee(settings, replace(settings.work, batch=batch))
    predicted = check.predictions.get(batch, {})
    arms = {mode: make_plan(mode, list(trainee.model.segments())) for mode in MODES}
    for name in settings.budgets:
        if predicted.get(name) is None:
            why = "no plan fits" if name in predicted else "not predicted in time"
            check.found["rows"].append({"batch": batch, "mode": name, "status": why})
        else:
            arms[name] = predicted[name][0]
    rows, seconds = {}, {}
    for name, plan in arms.items():
        trainee.plan(plan)
        row = {"batch": batch, "mode": name, "status": "completed"}
        row["predicted_bytes"] = predicted[name][1] if predicted.get(name) else None
        try:
            start = time.monotonic()
            row["peak_bytes"], row["reserved_bytes"] = trainee.peak()
            seconds[name] = (time.monotonic() - start) / 2
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            row["status"] = "out of memory"
        rows[name] = row
        check.found["rows"].append(row)  # at once, so that it is printed whatever comes
        if row["status"] != "completed":
            free_memory()

    def arm(name):
        def run():
            trainee.plan(arms[name])
            trainee.step()

        return run

    # No more rounds than fit into a share of the time that is left.
    share = check.left() / (1 + len(settings.batches) - settings.batches.index(batch))
    repeats = min(settings.repeats, int(share / max(1e-3, sum(seconds.values()))))
    if repeats < 1 or not seconds:
        check.skip(f"step times at batch {batch}", "the time was up")
        return
    timing = interleaved_timing({name: arm(name) for name in seconds}, warmup=0, repeats=repeats)
    for name, times in timing["arms"].items():
        rows[name] |= {
            "seconds": times["median_seconds"],
            "samples_per_second": batch / times["median_seconds"] if times["median_seconds"] else None,
            "slowdown": times["ratio"],
            "slowdown_iqr": times["ratio_iqr"],
            "baseline": timing["baseline"],
        }


def gradient_agreement(check):
    """Gradients in fp32 under every mode, against none; none a second time is the device's own noise."""
    side = check.settings.agreement
    matmul = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        work = replace(check.settings.work, height=side, width=side, batch=1)
        trainee = Trainee(check.settings, work, "fp32", "whole")
        names, reference = list(trainee.model.segments()), None
        buffers = {name: value.clone() for name, value in trainee.model.named_buffers()}
        for mode in ("none", *MODES):
            with torch.no_grad():
                for name, value in trainee.model.named_buffers():
                    value.copy_(buffers[name])
            trainee.plan(make_plan(mode, names))
            loss = trainee.backward()
            own = [p.grad.double() for p in trainee.model.parameters()]
            if reference is None:
                reference = loss, own
                continue
            norm = sum(g.square().sum() for g in reference[1]).sqrt()
            off = sum((a - b).square().sum() for a, b in zip(own, reference[1], strict=True)).sqrt()
            check.found["agreement"].append(
                {
                    "mode": mode if mode != "none" else "none, run again",
                    "equal": all(torch.equal(a, b) for a, b in zip(own, reference[1], strict=True)),
                    "relative_error": float(off / norm),
                    "loss_difference": float((loss - reference[0]).abs()),
                }
            )
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul


def loss_parity(check):
    """Losses of some AdamW steps in bf16, against none; none a second time is the device's own noise."""
    side, steps = check.settings.parity
    work = replace(check.settings.work, height=side, width=side, batch=1)
    reference = None
    for mode in ("none", *MODES):
        trainee = Trainee(check.settings, work)
        trainee.plan(make_plan(mode, list(trainee.model.segments())))
        losses = torch.stack([trainee.step() for _ in range(steps)]).double().cpu()
        if reference is None:
            reference = losses
            continue
        check.found["parity"].append(
            {
                "mode": mode if mode != "none" else "none, run again",
                "steps": steps,
                "first_loss": float(losses[0]),
                "last_loss": float(losses[-1]),
                "largest_difference": float((losses - reference).abs().max()),
            }
        )


def largest_batches(check):
    """The largest batch within a card's memory: by the trace's straight line, and by trying."""
    card, reserve = check.settings.card
    for mode in ("none", "stage", "selective"):
        peaks = {batch: known[mode][1] for batch, known in check.predictions.items() if mode in known}
        if len(peaks) < 2:
            check.skip(f"largest batch, {mode}", "not predicted in time")
            continue
        *_, low, high = sorted(peaks)  # peaks grow in straight lines, the steepest at the end
        slope = (peaks[high] - peaks[low]) / (high - low)
        planned = max(0, low + int((card - reserve - peaks[low]) // slope))
        tried = try_batches(check, mode, max(1, planned), card)
        check.found["largest"].append(
            {"mode": mode, "card_bytes": card, "reserve_bytes": reserve, "planned": planned, "tried": tried}
        )


def try_batches(check, mode, start, card):
    """The largest batch that runs with the allocator held to `card` bytes, sought around `start`."""
    cuda = check.settings.device == "cuda"
    if cuda:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, card / total))

    def runs(batch):
        if check.left() <= 0:
            raise TimeIsUp
        try:
            trainee = Trainee(check.settings, replace(check.settings.work, batch=batch))
            trainee.plan(make_plan(mode, list(trainee.model.segments())))
            return trainee.peak()[0] <= card
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not no_room(error):
                raise
        finally:
            trainee = None
            free_memory()
        return False

    try:
        low, high = 0, start
        while runs(high):
            low, high = high, high + 1
        while high - low > 1:
            middle = high - 1 if high == start else (low + high) // 2
            low, high = (middle, high) if runs(middle) else (low, middle)
        return low
    finally:
        if cuda:
            torch.cuda.set_per_process_memory_fraction(1.0)


def run(settings):
    """The whole check; what was found, as plain values."""
    check = Check(settings)
    if settings.device == "cuda" and not torch.cuda.is_available():
        check.skip("everything", "this machine has no CUDA device that torch can use")
        return check.found
    if settings.device == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        check.skip("everything in bf16", f"{torch.cuda.get_device_name()} has no bfloat16")
        check.section("gradients in fp32", gradient_agreement, check)
        return check.found

    def ring(*_):
        raise TimeIsUp

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, settings.seconds, 1.0)  # again, where a callback has swallowed it
    try:
        check.start_predictions()
        check.section("gradients in fp32", gradient_agreement, check)
        check.section("losses in bf16", loss_parity, check)
        check.section("waiting for predictions", check.wait_for_predictions)
        for batch in settings.batches:
            check.section(f"modes at batch {batch}", modes_at, check, batch)
        check.section("largest batch", largest_batches, check)
    except TimeIsUp:  # between two sections
        check.skip("the rest", "the time was up")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return check.found


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--seconds", type=float, help="all the time there is")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    from provenance import provenance
    from render import gpu_tables

    from seg4k.files import write_json

    settings = DRY if options.dry_run else FULL
    if options.seconds:
        settings = replace(settings, seconds=options.seconds)
    found = run(settings)
    result = {**provenance({**asdict(settings), "dry_run": options.dry_run}), **found}
    if options.out:
        write_json(options.out, result)
    print(gpu_tables(result), flush=True)


if __name__ == "__main__":
    main()
