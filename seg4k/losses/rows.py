"""Which rows a strip needs, what it takes in memory, into how many an image is cut: arithmetic only."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from seg4k.errors import UserError

# From here on 32-bit offsets overflow in kernels of several libraries, some without an error.
ELEMENT_LIMIT = 2**31

# Tensors of the size of the strip's fp32 logits that live at once, at the height of its backward pass.
_LOGITS_AT_ONCE = 3
# Bytes a pixel besides: int64 target and indices, masks, and a few fp32 maps without channels.
_PIXEL_BYTES = 48


@dataclass(frozen=True)
class Strip:
    """Rows of one strip: [start, stop) of the output, of the head's output, of the features it reads."""

    start: int
    stop: int
    head_start: int
    head_stop: int
    feature_start: int
    feature_stop: int


@dataclass(frozen=True)
class Rows:
    """The sizes that decide about strips.

    Attributes:
        batch, feature_channels, feature_height, feature_width: shape of the features.
        feature_bytes: bytes of one element of them.
        channels: of the logits.
        height, width: of the output in pixels, without padding.
        upsample: pixels per feature, 1, 2 or 4.
        halo: rows above and below that the head's convolutions look at.
    """

    batch: int
    feature_channels: int
    feature_height: int
    feature_width: int
    feature_bytes: int
    channels: int
    height: int
    width: int
    upsample: int
    halo: int

    def strip(self, start: int, stop: int) -> Strip:
        """Give the rows that output rows [start, stop) depend on, and no more."""
        s = self.upsample
        first, last = start, stop
        if s > 1:
            # Without aligned corners output row r lies at (r + 1/2) / s - 1/2: its floor and the next.
            first = max((2 * start + 1 - s) // (2 * s), 0)
            last = min((2 * stop - 1 - s) // (2 * s) + 2, self.feature_height)
        return Strip(
            start, stop, first, last, max(first - self.halo, 0), min(last + self.halo, self.feature_height)
        )

    def _tallest(self, rows: int) -> tuple[int, int]:
        """Rows that `rows` output rows need at most, of the features and in the upsampled logits."""
        head = rows if self.upsample == 1 else (rows - 1) // self.upsample + 3
        read = min(head + 2 * self.halo, self.feature_height)
        return read, (read if self.upsample == 1 else min(head, self.feature_height) * self.upsample)

    def largest(self, rows: int) -> int:
        """Elements of the largest tensor that a strip of `rows` output rows forms."""
        read, upsampled = self._tallest(rows)
        return self.batch * max(
            read * self.feature_width * self.feature_channels,
            upsampled * self.feature_width * self.upsample * self.channels,
        )

    def bytes(self, rows: int) -> int:
        """Bytes that a strip of `rows` output rows takes at once, about."""
        read, upsampled = self._tallest(rows)
        logits = upsampled * self.feature_width * self.upsample * self.channels * 4
        # The rows read, made contiguous, and their gradient.
        features = 2 * read * self.feature_width * self.feature_channels * self.feature_bytes
        return self.batch * (_LOGITS_AT_ONCE * logits + rows * self.width * _PIXEL_BYTES + features)

    def count(self, strips: int | str, strip_bytes: int) -> int:
        """Return how many strips to cut: `strips`, or for "auto" as few as stay within `strip_bytes` each.

        More than asked for where a strip would hold a tensor of 2^31 elements.

        Raises:
            UserError: where even one row would.
        """
        if self.largest(1) >= ELEMENT_LIMIT:
            raise UserError(
                f"one row of logits ({self.batch} images x {self.channels} classes x {self.width} columns) "
                f"takes a tensor of {self.largest(1)} elements, above the {ELEMENT_LIMIT - 1} that can be "
                "indexed: reduce batch.per_device or the width of data.image_size"
            )
        most = self._most(lambda rows: self.largest(rows) < ELEMENT_LIMIT)
        if strips == "auto":
            most = min(most, self._most(lambda rows: self.bytes(rows) <= strip_bytes))
            return -(-self.height // most)
        return max(min(int(strips), self.height), -(-self.height // most))

    def _most(self, fits: Callable[[int], bool]) -> int:
        """Return the most rows that fit, by bisection; at least one."""
        low, high = 1, self.height
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle) else (low, middle - 1)
        return low

    def cut(self, count: int) -> Iterator[Strip]:
        """Cut the height into `count` strips of equal height, give or take a row, from the top down."""
        edges = [i * self.height // count for i in range(count + 1)]
        for start, stop in pairwise(edges):
            yield self.strip(start, stop)
