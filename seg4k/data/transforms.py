"""Augmentation of one crop: albumentations, seeded per sample."""

import difflib
import os
import random
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from seg4k.data.images import Image, Mask
from seg4k.errors import UserError


@dataclass(frozen=True)
class Augment:
    """What is done to a training crop at random.

    Attributes:
        hflip: probability of a mirror image, left to right.
        vflip: probability of a mirror image, top to bottom.
        rotate90: probability of a turn by a random multiple of 90 degrees (180 in crops that are not square).
        colour: probability of a colour jitter; 8-bit images of 3 channels only.
        brightness: the jitter multiplies brightness by 1 - b to 1 + b.
        contrast: ... and contrast by 1 - c to 1 + c.
        saturation: ... and saturation by 1 - s to 1 + s.
        hue: ... and shifts hue by -h to +h of the colour circle (at most 0.5).
        scale: least and greatest zoom of the crop, spread evenly in log; (1, 1) leaves the scale as it is.
    """

    hflip: float = 0.0
    vflip: float = 0.0
    rotate90: float = 0.0
    colour: float = 0.0
    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0
    scale: tuple[float, float] = (1.0, 1.0)

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | None) -> "Augment":
        """Check and take over the group `data.augment`; null turns all of it off.

        Raises:
            UserError: for an unknown key or a value out of its range.
        """
        config = config or {}
        if not isinstance(config, Mapping):
            raise UserError(f"data.augment is {config!r}; give keys and values, or null for no augmentation.")
        names = [entry.name for entry in fields(cls)]
        for key, value in config.items():
            if key not in names:
                close = difflib.get_close_matches(str(key), names, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"the keys are {', '.join(names)}."
                raise UserError(f"Unknown key data.augment.{key}; {hint}")
            if key == "scale":
                good = (
                    isinstance(value, (list, tuple))
                    and len(value) == 2
                    and all(_is_number(v) for v in value)
                    and 0.1 <= value[0] <= value[1] <= 10
                )
                if not good:
                    raise UserError(
                        f"data.augment.scale is {value!r}; give [least, greatest] within 0.1 to 10."
                    )
            else:
                limit = 0.5 if key == "hue" else 1.0
                if not _is_number(value) or not 0 <= value <= limit:
                    raise UserError(f"data.augment.{key} is {value!r}; give a number from 0 to {limit:g}.")
        values = dict(config)
        if "scale" in values:
            values["scale"] = (float(values["scale"][0]), float(values["scale"][1]))
        return cls(**values)

    @property
    def transforms(self) -> bool:
        """Whether `Transform` has anything to do."""
        return self.hflip > 0 or self.vflip > 0 or self.rotate90 > 0 or self.jitters

    @property
    def jitters(self) -> bool:
        """Whether colours are changed at all."""
        return self.colour > 0 and max(self.brightness, self.contrast, self.saturation, self.hue) > 0

    def check_images(self, channels: int, dtype: np.dtype[Any]) -> None:
        """Refuse a colour jitter of images that have no colours.

        Raises:
            UserError: for other images than 8-bit ones of 3 channels.
        """
        if self.jitters and (channels != 3 or dtype != np.uint8):
            raise UserError(
                f"data.augment.colour is for 8-bit images of 3 channels; these have {channels} of "
                f"{dtype.itemsize * 8} bits: set data.augment.colour=0."
            )


class Transform:
    """Augments crops (H, W, C) with their masks (H, W); the size stays.

    `Augment.scale` is not done here: it is cheaper to read a larger or smaller window.
    """

    def __init__(self, augment: Augment, size: tuple[int, int]) -> None:
        # albumentations asks the network for a newer version when it is imported.
        os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")
        import albumentations as A

        steps: list[Any] = []
        if augment.hflip:
            steps.append(A.HorizontalFlip(p=augment.hflip))
        if augment.vflip:
            steps.append(A.VerticalFlip(p=augment.vflip))
        if augment.rotate90 and size[0] == size[1]:
            steps.append(A.RandomRotate90(p=augment.rotate90))
        elif augment.rotate90:
            # Half of the turns by a random multiple of 180 degrees are by 0.
            steps.append(A.Sequential([A.HorizontalFlip(p=1), A.VerticalFlip(p=1)], p=augment.rotate90 / 2))
        if augment.jitters:
            spread = {
                name: getattr(augment, name) for name in ("brightness", "contrast", "saturation", "hue")
            }
            steps.append(A.ColorJitter(**spread, p=augment.colour))
        self._compose = A.Compose(steps)

    def __call__(self, image: Image, mask: Mask, generator: np.random.Generator) -> tuple[Image, Mask]:
        """Change a crop in a way that depends on the state of `generator` alone."""
        # set_random_seed would give every step a generator of the same state, so that both flips always
        # agree; one shared pair of generators keeps the steps independent, and costs a third.
        self._compose.set_random_state(generator, random.Random(int(generator.integers(2**63))))
        done = self._compose(image=image, mask=mask)
        return done["image"], done["mask"]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
