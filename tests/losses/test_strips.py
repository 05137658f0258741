"""The loss and gradients by strips against the plain computation on whole logits."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import multiprocessing, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._python_dispatch import TorchDispatchMode

from seg4k.errors import UserError
from seg4k.losses.build import build_loss
from seg4k.losses.loss import add_sums
from seg4k.losses.rows import ELEMENT_LIMIT, Rows
from seg4k.losses.strips import (
    evaluate_strips,
    head_halo,
    predict_strips,
    strip_loss,
    strip_statistics,
    upsample_logits,
)
from tests.processes import leave_at_once

CONFIGS = {
    "ce": {"terms": {"ce": 1.0}},
    "ce_smoothed_weighted": {
        "terms": {"ce": 1.0},
        "label_smoothing": 0.1,
        "class_weights": [1.0, 0.3, 2.0, 5.0],
    },
    "focal": {"terms": {"focal": 1.0}},
    "dice": {"terms": {"dice": 1.0}},
    "jaccard": {"terms": {"jaccard": 1.0}},
    "tversky": {"terms": {"tversky": 1.0}},
    "ce_dice": {"terms": {"ce": 1.0, "dice": 1.0}},
    "all": {"terms": {"ce": 1.0, "focal": 1.0, "dice": 1.0, "jaccard": 1.0, "tversky": 1.0}},
}
CASES = ["all_valid", "some_ignored", "all_ignored", "class_absent"]
CHANNELS, CLASSES = 6, 4
FEW_BYTES = 60_000  # makes "auto" cut these small images into several strips


def scene(upsample=1, case="some_ignored", classes=CLASSES, size=(29, 21), padding=(2, 1), batch=2, seed=0):
    """Features, larger than the target by some padding, a head of kernel 3, and a target of odd size."""
    generator = torch.Generator().manual_seed(seed)
    shape = [-(-edge // upsample) + more for edge, more in zip(size, padding, strict=True)]
    features = torch.randn(batch, CHANNELS, *shape, generator=generator).requires_grad_()
    torch.manual_seed(seed)
    head = nn.Conv2d(CHANNELS, classes, 3, padding=1)
    with torch.no_grad():
        head.weight *= 5
    target = torch.randint(0, max(2, classes), (batch, *size), generator=generator)
    if case == "some_ignored":
        target[torch.rand(target.shape, generator=generator) < 0.2] = 255
        target[:, :5] = 255  # whole strips without a valid pixel
    if case == "all_ignored":
        target.fill_(255)
    if case == "class_absent":
        target[target == 1] = 0
    return features, head, target


def plain(features, head, target, loss, upsample):
    """What the strips have to reproduce."""
    logits = head(features)
    if upsample > 1:
        logits = F.interpolate(logits, scale_factor=upsample, mode="bilinear", align_corners=False)
    return loss(logits[..., : target.shape[1], : target.shape[2]], target)


def gradients(value, features, head):
    return torch.autograd.grad(value, [features, *head.parameters()])


def assert_same(features, head, value, expected, tolerance=1e-6, gradient_tolerance=1e-5):
    assert abs(value - expected) <= tolerance * abs(expected)
    ours, theirs = gradients(value, features, head), gradients(expected, features, head)
    for gradient, wanted in zip(ours, theirs, strict=True):
        assert gradient.dtype == wanted.dtype
        assert (gradient - wanted).norm() <= gradient_tolerance * wanted.norm()


@pytest.mark.parametrize("upsample", [1, 4])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("strips", [1, 2, 7, "auto"])
@pytest.mark.parametrize("name", CONFIGS)
def test_agreement_table(name, strips, case, upsample):
    features, head, target = scene(upsample, case)
    loss = build_loss(CONFIGS[name], CLASSES)
    value = strip_loss(features, head, target, loss, strips, upsample=upsample, strip_bytes=FEW_BYTES)
    assert_same(features, head, value, plain(features, head, target, loss, upsample))


@given(
    upsample=st.sampled_from([1, 2, 4]),
    kernel=st.sampled_from([1, 3, 5, (3, 1)]),
    dilation=st.integers(1, 2),
    height=st.integers(1, 33),
    width=st.integers(1, 9),
    padding=st.tuples(st.integers(0, 5), st.integers(0, 5)),
    strips=st.integers(1, 40),
    classes=st.integers(1, 4),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=150, deadline=None)
def test_any_geometry_in_float64(upsample, kernel, dilation, height, width, padding, strips, classes, seed):
    features, head, target = scene(upsample, "some_ignored", classes, (height, width), padding, 1, seed)
    head = nn.Conv2d(CHANNELS, classes, kernel, padding="same", dilation=dilation)
    features, head = features.detach().double().requires_grad_(), head.double()
    loss = build_loss({"terms": {"ce": 1.0, "dice": 1.0}}, classes)
    value = strip_loss(features, head, target, loss, strips, upsample=upsample)
    assert_same(features, head, value, plain(features, head, target, loss, upsample), 1e-12, 1e-10)
    labels = predict_strips(features, head, (height, width), strips, upsample=upsample)
    logits = upsample_logits(head(features), upsample)[..., :height, :width]
    expected = logits.argmax(1) if classes > 1 else (logits[:, 0] > 0).long()
    assert torch.equal(labels, expected)


@pytest.mark.parametrize("upsample", [1, 2, 4])
@pytest.mark.parametrize("height", [1, 2, 8, 15])
def test_strips_of_a_single_row(upsample, height):
    features, head, target = scene(upsample, size=(height, 7), case="all_valid")
    loss = build_loss(CONFIGS["ce_dice"], CLASSES)
    for strips in (height, height + 1, 1000):
        value = strip_loss(features, head, target, loss, strips, upsample=upsample)
        assert_same(features, head, value, plain(features, head, target, loss, upsample))


@pytest.mark.parametrize("head", [
    nn.Sequential(nn.Conv2d(CHANNELS, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, CLASSES, 5, padding=2)),
    nn.Sequential(nn.Conv2d(CHANNELS, CLASSES, 1), nn.Identity()),
    nn.Conv2d(CHANNELS, CLASSES, 3, padding=1, padding_mode="reflect"),
    nn.Conv2d(CHANNELS, CLASSES, 3, padding=1, padding_mode="replicate", bias=False),
])  # fmt: skip
def test_other_heads(head):
    features, _, target = scene(2)
    loss = build_loss(CONFIGS["ce_dice"], CLASSES)
    value = strip_loss(features, head, target, loss, 5, upsample=2)
    assert_same(features, head, value, plain(features, head, target, loss, 2))


def test_channels_last_features_keep_their_layout():
    features, head, target = scene()
    features = features.detach().to(memory_format=torch.channels_last).requires_grad_()
    loss = build_loss(CONFIGS["ce_dice"], CLASSES)
    value = strip_loss(features, head, target, loss, 5)
    expected = plain(features, head, target, loss, 1)
    assert_same(features, head, value, expected)
    value = strip_loss(features, head, target, loss, 5)
    gradient = torch.autograd.grad(value, features)[0]
    assert gradient.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("upsample", [1, 4])
@pytest.mark.parametrize("name", ["ce", "ce_dice"])
def test_bf16_autocast_against_its_own_run_in_one_piece(name, upsample):
    features, head, target = scene(upsample, size=(61, 48))
    features = features.detach().bfloat16().requires_grad_()
    loss = build_loss(CONFIGS[name], CLASSES)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = strip_loss(features, head, target, loss, 1, upsample=upsample)
        value = strip_loss(features, head, target, loss, 9, upsample=upsample)
        written_out = loss(
            upsample_logits(head(features), upsample)[..., : target.shape[1], : target.shape[2]], target
        )
    assert expected.item() == written_out.item()
    # The logits are the same bf16 numbers; gradients are rounded to bf16 once a strip, in different sums.
    assert_same(features, head, value, expected, 1e-6, 2**-8)


def test_bf16_weight_gradients_do_not_lose_digits_with_the_number_of_strips():
    features, head, target = scene(1, "all_valid", size=(256, 16), batch=1)
    features = features.detach().bfloat16().requires_grad_()
    loss = build_loss(CONFIGS["ce"], CLASSES)
    exact = gradients(plain(features.float(), head, target, loss, 1), features, head)[1]
    errors = []
    for strips in (1, 256):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = strip_loss(features, head, target, loss, strips)
        errors.append((gradients(value, features, head)[1] - exact).norm() / exact.norm())
    assert errors[1] < 2 * errors[0]


def test_gradient_accumulation_and_a_second_backward_pass():
    features, head, target = scene()
    loss = build_loss(CONFIGS["ce_dice"], CLASSES)
    value = strip_loss(features, head, target, loss, 4)
    value.backward(retain_graph=True)
    once = [features.grad.clone(), *(parameter.grad.clone() for parameter in head.parameters())]
    value.backward()
    for gradient, first in zip(
        [features.grad, *(parameter.grad for parameter in head.parameters())], once, strict=True
    ):
        torch.testing.assert_close(gradient, 2 * first)


def test_features_may_have_other_consumers_and_be_no_leaf():
    source, head, target = scene()
    loss = build_loss(CONFIGS["ce_dice"], CLASSES)

    def total(features, by_strips):
        own = (
            strip_loss(features, head, target, loss, 5)
            if by_strips
            else plain(features, head, target, loss, 1)
        )
        return own + features.square().mean() + own * features.mean()

    ours = torch.autograd.grad(total(source * 2, True), source)[0]
    theirs = torch.autograd.grad(total(source * 2, False), source)[0]
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("frozen", ["features", "head"])
def test_frozen_parts_get_no_gradient(frozen):
    features, head, target = scene()
    loss = build_loss(CONFIGS["ce_dice"], CLASSES)
    (features if frozen == "features" else head).requires_grad_(False)
    strip_loss(features, head, target, loss, 5).backward()
    assert (features.grad is None) == (frozen == "features")
    assert (head.weight.grad is None) == (frozen == "head")


def test_a_change_in_place_before_the_backward_pass_raises():
    features, head, target = scene()
    features = features * 1
    value = strip_loss(features, head, target, build_loss(CONFIGS["ce"], CLASSES), 3)
    features.add_(1)
    with pytest.raises(RuntimeError, match="modified inplace"):
        value.backward()


def test_the_same_bits_twice():
    features, head, target = scene(4)
    loss = build_loss(CONFIGS["all"], CLASSES)
    runs = []
    for _ in range(2):
        value = strip_loss(features, head, target, loss, 6, upsample=4)
        runs.append([value.detach(), *gradients(value, features, head)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_normalizer_and_statistics():
    features, head, target = scene(2)
    loss = build_loss(CONFIGS["ce_dice"], CLASSES)
    pixels = loss.pixels(target)
    value = strip_loss(features, head, target, loss, 3, upsample=2, normalizer=4 * pixels)
    expected = strip_loss(features, head, target, loss, 1, upsample=2) / 4
    torch.testing.assert_close(value, expected)
    sums = strip_statistics(features, head, target, loss, 3, upsample=2)
    torch.testing.assert_close(loss.finish(sums), 4 * expected)
    assert sums["count"].sum() == pixels


@pytest.mark.parametrize("classes", [1, 4])
@pytest.mark.parametrize("upsample", [1, 2])
def test_validation_gives_labels_and_the_loss_of_the_whole_set(classes, upsample):
    loss = build_loss({"terms": {"ce": 1.0, "dice": 1.0}}, classes)
    total = None
    logits, targets = [], []
    for seed in range(3):
        features, head, target = scene(upsample, classes=classes, seed=seed)
        torch.manual_seed(0)
        head.reset_parameters()
        labels, sums = evaluate_strips(features, head, target, loss, 5, upsample=upsample)
        assert not any(value.requires_grad for value in sums.values())
        total = add_sums(total, sums)
        targets.append(target)
        with torch.no_grad():
            logits.append(
                upsample_logits(head(features), upsample)[..., : target.shape[1], : target.shape[2]]
            )
        assert torch.equal(
            labels, predict_strips(features, head, tuple(target.shape[1:]), 4, upsample=upsample)
        )
        assert torch.equal(labels, logits[-1].argmax(1) if classes > 1 else (logits[-1][:, 0] > 0).long())
    whole = loss(torch.cat(logits), torch.cat(targets))
    assert loss.finish(total).item() == pytest.approx(whole.item(), rel=1e-6)


# Sizes and memory.


def rows(height=4320, width=7680, classes=150, batch=1, upsample=1, halo=1, channels=32):
    return Rows(
        batch,
        channels,
        -(-height // upsample),
        -(-width // upsample),
        2,
        classes,
        height,
        width,
        upsample,
        halo,
    )


@given(
    upsample=st.sampled_from([1, 2, 4]),
    halo=st.integers(0, 3),
    height=st.integers(1, 70),
    more=st.integers(0, 3),
    count=st.integers(1, 70),
)
def test_cuts_cover_every_row_once_and_read_no_more_than_counted(upsample, halo, height, more, count):
    sizes = Rows(1, 3, -(-height // upsample) + more, 5, 4, 2, height, 5, upsample, halo)
    count = sizes.count(count, 1)
    strips = list(sizes.cut(count))
    assert [row for strip in strips for row in range(strip.start, strip.stop)] == list(range(height))
    for strip in strips:
        tall = strip.stop - strip.start
        read, upsampled = sizes._tallest(tall)
        assert 0 < strip.feature_stop - strip.feature_start <= read
        assert (strip.head_stop - strip.head_start) * (upsample if upsample > 1 else 1) <= upsampled


def test_auto_takes_as_few_strips_as_stay_within_the_bytes():
    sizes = rows()
    for limit in (2**26, 2**28, 2**30):
        count = sizes.count("auto", limit)
        assert sizes.bytes(-(-sizes.height // count)) <= limit
        assert sizes.bytes(-(-sizes.height // (count - 1))) > limit or count == 1
    assert sizes.count("auto", 1) == sizes.height  # one row is the least
    assert sizes.count("auto", 2**40) == sizes.count(1, 1)  # and 2^31 elements the most
    assert rows(64, 64, 3).count("auto", 2**27) == 1


@pytest.mark.parametrize("classes", [19, 150, 1000])
@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("upsample", [1, 2, 4])
def test_strips_shrink_until_no_tensor_has_2_to_the_31_elements(classes, batch, upsample):
    sizes = rows(classes=classes, batch=batch, upsample=upsample)
    for strips in (1, 2, "auto"):
        count = sizes.count(strips, 2**50)
        assert sizes.largest(-(-sizes.height // count)) < ELEMENT_LIMIT
    assert sizes.count(5000, 1) == sizes.height


def test_a_row_that_does_not_fit_is_an_error_that_says_so():
    sizes = rows(width=7680 * 8, classes=20_000)
    with pytest.raises(
        UserError, match=r"one row of logits \(1 images x 20000 classes x 61440 columns\).*reduce"
    ):
        sizes.count("auto", 2**27)


class Largest(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that any operation returns."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.numel())
        return result


@pytest.mark.parametrize("upsample", [1, 4])
@pytest.mark.parametrize("strips", [1, 16])
def test_no_tensor_of_2_to_the_31_elements_at_8k_and_150_classes(strips, upsample):
    height, width, classes = 4320, 7680, 150
    assert height * width * classes >= ELEMENT_LIMIT
    with FakeTensorMode(), Largest() as largest:
        head = nn.Conv2d(32, classes, 3, padding=1)
        features = torch.empty(1, 32, height // upsample, width // upsample, dtype=torch.bfloat16)
        target = torch.empty(1, height, width, dtype=torch.int64)
        loss = build_loss(CONFIGS["ce_dice"], classes)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            strip_loss(features.requires_grad_(), head, target, loss, strips, upsample=upsample).backward()
            evaluate_strips(features, head, target, loss, strips, upsample=upsample)
    assert height * width * classes // 17 < largest.elements < ELEMENT_LIMIT


class Tail(nn.Module):
    """Head and loss as one module: MemTracker follows repeated calls of a module only inside another."""

    def __init__(self, classes, upsample, strips, config=None):
        super().__init__()
        self.head = nn.Conv2d(32, classes, 3, padding=1)
        self.loss = build_loss(config or CONFIGS["ce_dice"], classes)
        self.upsample = upsample
        self.strips = strips

    def forward(self, features, target):
        return strip_loss(features, self.head, target, self.loss, self.strips, upsample=self.upsample)


def traced_peak(classes, upsample, strips, height=2160, width=3840):
    """Bytes at the peak beside features, their gradient and the target, on fake tensors in bf16."""
    with FakeTensorMode():
        tail = Tail(classes, upsample, strips)
        features = torch.empty(
            1, 32, height // upsample, width // upsample, dtype=torch.bfloat16
        ).requires_grad_()
        target = torch.empty(1, height, width, dtype=torch.int64)
        tracker = MemTracker()
        tracker.track_external(features, target, tail)
        with tracker, torch.autocast("cpu", dtype=torch.bfloat16):
            tail(features, target).backward()
        peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    return peak - 2 * 2 * features.numel() - 8 * target.numel()


@pytest.mark.parametrize("upsample", [1, 4])
def test_peak_at_4k_with_19_classes(upsample):
    assert traced_peak(19, upsample, "auto") <= 0.15 * 2**30


@pytest.mark.slow
@pytest.mark.parametrize("upsample", [1, 2, 4])
@pytest.mark.parametrize(("classes", "whole"), [(19, 1.0), (150, 10.0)])
def test_peaks_at_4k(classes, whole, upsample):
    assert traced_peak(classes, upsample, "auto") <= 0.15 * 2**30
    assert traced_peak(classes, upsample, 1) >= whole * 2**30


def test_the_features_have_one_gradient_whatever_the_number_of_strips():
    # 16 strips of the rows of 1 class: a second tensor of the features' size would stand out.
    gradient = 2 * 32 * 2160 * 3840
    assert traced_peak(1, 1, 16) < 0.5 * gradient


# Heads and sizes that do not fit.


@pytest.mark.parametrize(
    ("head", "halo"),
    [
        (nn.Conv2d(2, 2, 1), 0),
        (nn.Conv2d(2, 2, 3, padding=1), 1),
        (nn.Conv2d(2, 2, 5, padding="same", dilation=3), 6),
        (nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.ReLU(), nn.Conv2d(2, 2, (1, 9), padding=(0, 4))), 1),
    ],
)
def test_halo(head, halo):
    assert head_halo(head) == halo


@pytest.mark.parametrize(
    "head",
    [
        nn.Conv2d(CHANNELS, CLASSES, 3),
        nn.Conv2d(CHANNELS, CLASSES, 3, padding=1, stride=2),
        nn.Conv2d(CHANNELS, CLASSES, 2, padding="same"),
        nn.Conv2d(CHANNELS, CLASSES, 3, padding=1, padding_mode="circular"),
    ],
)
def test_convolutions_that_do_not_keep_the_rows_are_refused(head):
    with pytest.raises(UserError, match=r"does not keep the rows .* or set loss\.strips=1"):
        head_halo(head)


@pytest.mark.parametrize("module", [nn.BatchNorm2d(CLASSES), nn.Dropout(0.5), nn.Upsample(scale_factor=1.0)])
def test_modules_that_look_further_are_refused_by_strips_and_work_in_one_piece(module):
    features, head, target = scene()
    head = nn.Sequential(head, module)
    loss = build_loss(CONFIGS["ce"], CLASSES)
    with pytest.raises(
        UserError, match=rf"head's 1 \({type(module).__name__}\) cannot be computed strip by strip"
    ):
        strip_loss(features, head, target, loss, 2)
    assert strip_loss(features, head, target, loss, 1).isfinite()


def test_sizes_that_do_not_fit_are_refused():
    features, head, target = scene()
    loss = build_loss(CONFIGS["ce"], CLASSES)
    with pytest.raises(ValueError, match="do not cover"):
        strip_loss(features[:, :, :20], head, target, loss)
    with pytest.raises(UserError, match=r"model\.head\.stride must be 1, 2 or 4, got 3"):
        strip_loss(features, head, target, loss, upsample=3)
    with pytest.raises(UserError, match="no Conv2d"):
        strip_loss(features, nn.Identity(), target, loss)


# Several processes.


def _train_in_process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    tail = nn.parallel.DistributedDataParallel(_tail())
    features, target = _parts()
    tail(features[rank : rank + 1].requires_grad_(), target[rank : rank + 1]).backward()
    torch.save(tail.module.head.weight.grad, Path(folder) / f"{rank}.pt")
    leave_at_once()


def _tail():
    torch.manual_seed(0)
    return Tail(CLASSES, 2, 5)


def _parts():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 32, 9, 8, generator=generator), torch.randint(
        0, CLASSES, (2, 17, 15), generator=generator
    )


def test_distributed_data_parallel_averages_the_gradients_of_the_processes(tmp_path):
    multiprocessing.spawn(_train_in_process, args=(str(tmp_path),), nprocs=2)
    tail = _tail()
    features, target = _parts()
    for rank in range(2):
        (tail(features[rank : rank + 1], target[rank : rank + 1]) / 2).backward()
    for rank in range(2):
        torch.testing.assert_close(
            torch.load(tmp_path / f"{rank}.pt", weights_only=True), tail.head.weight.grad
        )
