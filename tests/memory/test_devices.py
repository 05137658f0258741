from pathlib import Path

import pytest
import yaml

from seg4k.errors import UserError
from seg4k.memory.devices import device_from_dict, this_device

FOLDER = Path(__file__).parents[2] / "conf" / "device"
NAMES = {"rtx3060", "rtx4090", "l4", "a10", "t4", "a100-40", "a100-80", "h100", "h200", "cpu"}


def read(name):
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text())


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_file_is_a_device(name):
    device = device_from_dict(read(name))
    assert device.budget_bytes > 0
    assert device.flops("bfloat16") == device.bf16_flops
    assert device.flops("float64") == device.flops("float32") == device.fp32_flops
    assert device.source
    if device.kind == "cuda":
        assert device.memory_bandwidth > device.host_bandwidth
        assert device.fp16_flops > device.fp32_flops


def test_the_promised_devices_are_there():
    assert {path.stem for path in FOLDER.glob("*.yaml")} >= NAMES


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "tpu"}, "cuda or cpu"),
        ({"memory_bytes": None}, "memory_bytes is None"),
        ({"memory_bytes": "24GiB"}, "memory_bytes is '24GiB'"),
        ({"fp32_flops": 0}, "fp32_flops is 0"),
        ({"reserve_bytes": 10**12}, "lower it"),
        ({"colour": "green"}, "unknown keys \\['colour'\\]"),
    ],
)
def test_impossible_figures_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        device_from_dict(read("l4") | change)


def test_missing_figures_are_named():
    values = read("l4")
    del values["host_bandwidth"]
    with pytest.raises(UserError, match="missing keys \\['host_bandwidth'\\]"):
        device_from_dict(values)


def test_this_machine_can_be_measured():
    device = this_device()
    assert device.memory_bytes > device.reserve_bytes
    assert min(device.bf16_flops, device.fp16_flops, device.fp32_flops, device.memory_bandwidth) > 1e6
