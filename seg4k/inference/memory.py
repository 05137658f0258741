"""Whether an image fits as a whole: one forward pass is measured, and scaled up by the pixels."""

import os
from pathlib import Path

import torch

from seg4k.inference.segmenter import Segmenter
from seg4k.memory.ledger import measure_cpu_peak

# Of the memory that is free; the rest is for what the allocator cannot use.
_SHARE = 0.8


class WholeImages:
    """Tells which images fit as a whole.

    The peak of a forward pass without gradients grows as the pixels do (the attention of torch holds no
    matrix of tokens by tokens), so one pass at the training size measures what a pixel costs.
    """

    def __init__(self, segmenter: Segmenter) -> None:
        self._segmenter = segmenter
        self._bytes_per_pixel: float | None = None

    def fit(self, height: int, width: int, scores: bool) -> bool:
        """Whether an image fits; `scores` where probabilities of all classes are held beside it."""
        if self._bytes_per_pixel is None:
            self._bytes_per_pixel = self._measure()
        held = self._bytes_per_pixel + (12 * len(self._segmenter.classes) if scores else 0)
        return bool(held * height * width <= _SHARE * free_bytes(self._segmenter.device))

    def _measure(self) -> float:
        segmenter = self._segmenter
        height, width = (max(64, int(side)) for side in segmenter.config["data"]["image_size"])
        image = torch.zeros(1, segmenter.in_channels, height, width, dtype=torch.uint8)
        if segmenter.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(segmenter.device)
            before = torch.cuda.memory_allocated(segmenter.device)
            segmenter.labels(image)
            peak = torch.cuda.max_memory_allocated(segmenter.device) - before
        else:
            static = sum(t.numel() * t.element_size() for t in segmenter.model.state_dict().values())
            roots = [segmenter.model, image]
            peak = measure_cpu_peak(lambda: segmenter.labels(image), steps=1, roots=roots) - static
        return float(max(int(peak), 0) / (height * width))


def free_bytes(device: torch.device) -> int:
    """Bytes that may still be taken on a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(_free_of_the_machine(), *_free_of_the_container())


def _free_of_the_machine() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:  # noqa: PTH123 - no file of ours
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _free_of_the_container(root: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """What the limit of a container, if there is one, leaves; files that the kernel only caches are free."""
    free = []
    for folder, limit, used in (
        (root, "memory.max", "memory.current"),
        (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            most, taken = ((folder / name).read_text().strip() for name in (limit, used))
            statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except OSError:
            continue
        if most.isdigit():  # not "max"
            free.append(max(0, int(most) - int(taken) + int(statistics.get("inactive_file", 0))))
    return free
