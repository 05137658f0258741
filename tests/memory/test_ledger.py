import gc

import pytest
import torch
from torch import nn

from seg4k.memory.ledger import Ledger, Reading, measure_cpu_peak
from seg4k.memory.storages import static_bytes, storage_bytes, tensors_in

KIB = 1024


def blank(kib):
    return torch.zeros(kib * KIB, dtype=torch.uint8)


def test_known_pattern_of_allocations():
    kept = blank(100)

    def step():
        a = blank(10)
        b = blank(20)
        del a
        c = blank(30)
        del b, c

    assert measure_cpu_peak(step, warmup=0, roots=[kept]) == (100 + 20 + 30) * KIB


def test_block_alive_before_and_released_inside_the_window():
    box = [blank(400)]

    def step():
        blank(50)
        box.clear()
        blank(300)

    # Before its release 400 + 50; afterwards 300 alone.
    assert measure_cpu_peak(step, warmup=0, steps=1, roots=box) == 450 * KIB
    box.append(blank(400))

    def late():
        box.clear()
        blank(300)

    assert measure_cpu_peak(late, warmup=0, steps=1, roots=box) == 400 * KIB


def test_views_and_shared_storages_count_once():
    base = blank(64)
    views = [base[:10], base.view(64, KIB), base]
    assert storage_bytes(tensors_in({"a": views, "b": (base,)})) == 64 * KIB


def test_batch_that_the_allocator_did_not_report():
    ledger = Ledger("cpu", roots=[])
    ledger.start()
    for _ in range(2):
        array = bytearray(128 * KIB)
        batch = {"image": torch.frombuffer(array, dtype=torch.uint8), "name": ["a"]}
        ledger.hold(batch)
        blank(16)
        del batch
    own = {"image": blank(32)}
    ledger.hold(own)
    assert ledger.is_open
    assert ledger.stop().peak_bytes == (128 + 16) * KIB
    assert not ledger.is_open


def test_every_tensor_of_the_process_is_the_default():
    gc.collect()
    before = measure_cpu_peak(lambda: None)
    hidden = [{"deep": [blank(77)]}]
    assert measure_cpu_peak(lambda: None) - before == 77 * KIB
    del hidden


def test_matmul_net_against_closed_form():
    rows, width = 64, 128
    first, second = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
    x = torch.ones(rows, width)
    net = nn.Sequential(first, second)

    def step():
        net.zero_grad()
        net(x).sum().backward()

    weight, activation = width * width * 4, rows * width * 4
    # The largest moment is the last: both weights, both gradients, the input, the gradient of the first
    # product, and the loss with its own gradient. The first product itself has gone by then.
    assert measure_cpu_peak(step, roots=[net, x]) == 4 * weight + 2 * activation + 2 * 4


def test_largest_of_several_windows_until_reset():
    ledger = Ledger("cpu", roots=[])
    assert ledger.reading().peak_bytes is None
    for kib in (50, 20):
        ledger.start()
        blank(kib)
        ledger.stop()
    reading = ledger.reading()
    assert reading == Reading(50 * KIB, "cpu_allocator", None)
    ledger.reset()
    assert ledger.reading().peak_bytes is None


def test_silent(capfd):
    box = [blank(8)]
    measure_cpu_peak(box.clear, warmup=0, roots=box)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err == ""


def test_static_bytes():
    net = nn.Sequential(nn.Linear(10, 5, bias=False), nn.BatchNorm1d(5, affine=False))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    weight, statistics = 200, 5 * 4 * 2 + 8
    assert static_bytes([net], [optimizer]) == 2 * weight + statistics
    net(torch.ones(3, 10)).sum().backward()
    optimizer.step()
    assert static_bytes([net], [optimizer]) == 3 * weight + statistics
    optimizer.zero_grad()
    assert static_bytes([net, net], [optimizer]) == 3 * weight + statistics
    net.requires_grad_(False)
    assert static_bytes([net]) == weight + statistics


@pytest.mark.parametrize("steps", [1, 3])
def test_error_in_a_step_closes_the_window(steps):
    def step():
        raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        measure_cpu_peak(step, warmup=0, steps=steps, roots=[])
    assert measure_cpu_peak(lambda: None, warmup=0, roots=[]) == 0
