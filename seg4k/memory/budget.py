"""How many bytes tensors may take: what is asked for, and never more than the device has."""

import re
from dataclasses import dataclass

from seg4k.errors import UserError
from seg4k.memory.devices import Device
from seg4k.memory.readable import gib

__all__ = ["Budget", "parse_bytes"]

KEY = "activation_checkpointing.budget"
UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def parse_bytes(value: int | float | str, where: str) -> int:
    """Bytes from a number, or from words such as `24GiB` or `500 MB`.

    Raises:
        UserError: anything else, or nothing at all.
    """
    found = re.fullmatch(r"\s*([0-9]{1,30}(?:\.[0-9]*)?|\.[0-9]+)\s*([a-zA-Z]*)\s*", str(value))
    if not found or found[2].upper() not in UNITS:
        raise UserError(f"{where}={value}: give bytes, or a number and a unit, such as 24GiB")
    size = int(float(found[1]) * UNITS[found[2].upper()])
    if size <= 0:
        raise UserError(f"{where}={value}: give more than nothing")
    return size


@dataclass(frozen=True)
class Budget:
    """Bytes that tensors may take.

    Attributes:
        device: what is planned for.
        given: bytes that the configuration asks for; None for all that the device has.
    """

    device: Device
    given: int | None = None

    @classmethod
    def of(cls, value: int | float | str | None, device: Device) -> "Budget":
        """From what `activation_checkpointing.budget` holds."""
        return cls(device, None if value is None else parse_bytes(value, KEY))

    @property
    def bytes(self) -> int:
        """The smaller of what is asked for and what the device has beside its reserve."""
        there = self.device.budget_bytes
        return there if self.given is None else min(self.given, there)

    @property
    def bound(self) -> str:
        """Which of the two it is, in a sentence."""
        there, name = self.device.budget_bytes, self.device.name
        if self.given is None:
            return f"The device bounds it: {name} has {gib(there)} for tensors."
        asked = f"{KEY}={gib(self.given)}"
        if self.given > there:
            return f"The device bounds it: {asked} is above the {gib(there)} that {name} has for tensors."
        return f"{asked} bounds it: {name} has {gib(there)} for tensors."
