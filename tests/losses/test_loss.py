"""Losses and gradients against formulas in float64, and against other libraries where they are right."""

import math

import pytest
import segmentation_models_pytorch.losses as smp
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

from seg4k.losses.build import build_loss
from seg4k.losses.loss import SegmentationLoss, WeightedTerm, add_sums
from seg4k.losses.terms import CrossEntropy

CONFIGS = {
    "ce": {"terms": {"ce": 1.0}},
    "ce_smoothed": {"terms": {"ce": 1.0}, "label_smoothing": 0.1},
    "focal": {"terms": {"focal": 1.0}},
    "focal_half": {"terms": {"focal": 1.0}, "gamma": 0.5},
    "dice": {"terms": {"dice": 1.0}},
    "dice_smooth": {"terms": {"dice": 1.0}, "smooth": 1.0},
    "jaccard": {"terms": {"jaccard": 1.0}},
    "tversky": {"terms": {"tversky": 1.0}, "alpha": 0.3, "beta": 0.7},
    "ce_dice": {"terms": {"ce": 1.0, "dice": 0.5}},
    "all": {
        "terms": {"ce": 1.0, "focal": 2.0, "dice": 0.5, "jaccard": 0.3, "tversky": 0.2},
        "label_smoothing": 0.05,
        "smooth": 0.1,
    },
}
CASES = ["all_valid", "some_ignored", "all_ignored", "class_absent"]


def batch(classes, case="some_ignored", shape=(2, 9, 11), dtype=torch.float32, seed=0):
    """Logits and target; one class means a binary task with one channel and two labels."""
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(shape[0], classes, *shape[1:], generator=generator)).to(dtype).requires_grad_()
    target = torch.randint(0, max(2, classes), shape, generator=generator)
    if case == "some_ignored":
        target[torch.rand(shape, generator=generator) < 0.3] = 255
        target[:, :3] = 255
    if case == "all_ignored":
        target.fill_(255)
    if case == "class_absent":
        target[target == 1] = 0
    return logits, target


def reference(config, logits, target, weights=None):
    """The loss in float64, pixel by pixel and class by class as the textbook writes it."""
    binary = logits.shape[1] == 1
    z = logits.double().permute(0, 2, 3, 1).reshape(-1, logits.shape[1])
    if binary:
        z = torch.cat([torch.zeros_like(z), z], 1)
    y = target.flatten()
    z, y = z[y != 255], y[y != 255]
    classes = z.shape[1]
    p = z.exp() / z.exp().sum(1, keepdim=True)
    onehot = torch.eye(classes, dtype=torch.float64)[y]
    w = torch.ones(classes, dtype=torch.float64) if weights is None else torch.tensor(weights).double()
    zero = logits.double().sum() * 0
    if len(y) == 0:
        return zero
    total = zero
    for name, factor in config["terms"].items():
        if name in ("ce", "focal"):
            truth = onehot
            focus = torch.ones_like(p)
            if name == "ce":
                e = config.get("label_smoothing", 0.0)
                truth = (1 - e) * onehot + e / classes
            else:
                focus = (1 - p) ** config.get("gamma", 2.0)
            numerator = -(w * truth * focus * p.log()).sum()
            value = numerator / (w * onehot).sum()
        else:
            alpha, beta = {
                "dice": (0.5, 0.5),
                "jaccard": (1.0, 1.0),
                "tversky": (config.get("alpha", 0.3), config.get("beta", 0.7)),
            }[name]
            s = config.get("smooth", 0.0)
            numerator = denominator = 0.0
            for c in range(1 if binary else 0, classes):
                if onehot[:, c].sum() == 0:
                    continue
                tp = (p[:, c] * onehot[:, c]).sum()
                fp = (p[:, c] * (1 - onehot[:, c])).sum()
                fn = ((1 - p[:, c]) * onehot[:, c]).sum()
                numerator = numerator + w[c] * (1 - (tp + s) / (tp + alpha * fp + beta * fn + s))
                denominator = denominator + w[c]
            value = numerator / denominator if denominator else zero
        total = total + factor * value
    return total


def assert_agrees(loss, expected, logits, tolerance=1e-6, gradient_tolerance=1e-5, floor=0.0):
    """Relative tolerances; `floor` is absolute, for values that are differences of larger ones."""
    gradient, wanted = torch.autograd.grad(loss, logits)[0], torch.autograd.grad(expected, logits)[0]
    assert math.isclose(loss.item(), expected.item(), rel_tol=tolerance, abs_tol=max(floor, 1e-12))
    assert gradient.isfinite().all()
    assert (gradient - wanted).norm() <= gradient_tolerance * wanted.norm() + floor


@pytest.mark.parametrize("classes", [1, 2, 5, 19])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", CONFIGS)
def test_against_float64_formulas(name, case, classes):
    logits, target = batch(classes, case)
    loss = build_loss(CONFIGS[name], classes)(logits, target)
    assert loss.dtype == torch.float32
    assert_agrees(loss, reference(CONFIGS[name], logits, target), logits)


@pytest.mark.parametrize("classes", [1, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_class_weights_against_float64_formulas(name, classes):
    logits, target = batch(classes)
    weights = [0.2, 3.0, 0.0, 1.0][: max(2, classes)]
    loss = build_loss({**CONFIGS[name], "class_weights": weights}, classes)
    assert_agrees(loss(logits, target), reference(CONFIGS[name], logits, target, weights), logits)


@pytest.mark.parametrize("classes", [1, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_gradcheck(name, classes):
    logits, target = batch(classes, shape=(1, 4, 3), dtype=torch.float64)
    target[0, 3] = torch.tensor([0, 1, max(1, classes - 1)])
    loss = build_loss(CONFIGS[name], classes)
    assert torch.autograd.gradcheck(lambda z: loss(z, target), logits)


@given(
    batch_size=st.integers(1, 3),
    height=st.integers(1, 8),
    width=st.integers(1, 8),
    classes=st.integers(1, 6),
    name=st.sampled_from(sorted(CONFIGS)),
    seed=st.integers(0, 2**16),
)
@example(batch_size=1, height=4, width=1, classes=3, name="ce", seed=1123)
@settings(max_examples=60, deadline=None)
def test_any_shape_against_float64_formulas(batch_size, height, width, classes, name, seed):
    logits, target = batch(classes, "some_ignored", (batch_size, height + 3, width), seed=seed)
    loss = build_loss(CONFIGS[name], classes)(logits, target)
    # A few pixels may all be all but certain: what is left of logits of about 10 is their rounding.
    floor = 16 * torch.finfo(torch.float32).eps
    assert_agrees(loss, reference(CONFIGS[name], logits, target), logits, 1e-5, 1e-4, floor)


# Other libraries, where theirs is right.


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weights", [None, [1.0, 0.5, 2.0, 0.1, 3.0]])
def test_cross_entropy_is_torchs(smoothing, weights):
    logits, target = batch(5)
    loss = build_loss({"terms": {"ce": 1.0}, "label_smoothing": smoothing, "class_weights": weights}, 5)
    expected = F.cross_entropy(
        logits,
        target,
        None if weights is None else torch.tensor(weights),
        ignore_index=255,
        label_smoothing=smoothing,
    )
    assert_agrees(loss(logits, target), expected, logits)


def test_binary_cross_entropy_is_torchs():
    logits, target = batch(1)
    valid = target != 255
    expected = F.binary_cross_entropy_with_logits(logits[:, 0][valid], target[valid].float())
    assert_agrees(build_loss({"terms": {"ce": 1.0}}, 1)(logits, target), expected, logits)


def test_binary_focal_is_smps():
    logits, target = batch(1)
    expected = smp.FocalLoss("binary", gamma=1.5, ignore_index=255)(logits, target[:, None].float())
    loss = build_loss({"terms": {"focal": 1.0}, "gamma": 1.5}, 1)
    assert_agrees(loss(logits, target), expected, logits)


@pytest.mark.parametrize("smooth", [0.0, 1.0])
@pytest.mark.parametrize("classes", [1, 4])
def test_dice_is_smps_where_every_class_occurs(classes, smooth):
    logits, target = batch(classes)
    mode = "binary" if classes == 1 else "multiclass"
    expected = smp.DiceLoss(mode, ignore_index=255, smooth=smooth)(logits, target)
    loss = build_loss({"terms": {"dice": 1.0}, "smooth": smooth}, classes)
    assert_agrees(loss(logits, target), expected, logits)


def test_jaccard_and_tversky_are_smps_where_every_class_occurs():
    logits, target = batch(4, "all_valid")  # smp's Jaccard knows no ignored pixels
    jaccard = build_loss({"terms": {"jaccard": 1.0}}, 4)(logits, target)
    assert_agrees(jaccard, smp.JaccardLoss("multiclass")(logits, target), logits)
    tversky = build_loss({"terms": {"tversky": 1.0}, "alpha": 0.2, "beta": 0.9}, 4)(logits, target)
    assert_agrees(tversky, smp.TverskyLoss("multiclass", alpha=0.2, beta=0.9)(logits, target), logits)


def test_an_absent_class_does_not_dilute_dice():
    logits, target = batch(4, "class_absent")
    ours = build_loss({"terms": {"dice": 1.0}}, 4)(logits, target)
    theirs = smp.DiceLoss("multiclass", ignore_index=255)(logits, target)
    assert ours.item() == pytest.approx(theirs.item() * 4 / 3, rel=1e-5)


# Relations between the objectives.


def test_focal_with_gamma_zero_is_cross_entropy():
    logits, target = batch(4)
    weights = [1.0, 2.0, 0.5, 3.0]
    focal = build_loss({"terms": {"focal": 1.0}, "gamma": 0.0, "class_weights": weights}, 4)
    ce = build_loss({"terms": {"ce": 1.0}, "class_weights": weights}, 4)
    assert_agrees(focal(logits, target), ce(logits, target), logits)


def test_one_channel_is_two_channels_with_the_first_at_zero():
    logits, target = batch(1)
    both = torch.cat([torch.zeros_like(logits), logits], 1)
    one = build_loss({"terms": {"ce": 1.0, "focal": 1.0}, "label_smoothing": 0.1}, 1)
    two = build_loss({"terms": {"ce": 1.0, "focal": 1.0}, "label_smoothing": 0.1}, 2)
    assert_agrees(one(logits, target), two(both, target), logits)


# Limits: ignored pixels, extreme logits, precision, memory.


@pytest.mark.parametrize("classes", [1, 5])
@pytest.mark.parametrize("name", CONFIGS)
def test_nothing_valid_is_zero_with_zero_gradients(name, classes):
    logits, target = batch(classes, "all_ignored")
    loss = build_loss(CONFIGS[name], classes)(logits, target)
    assert loss.item() == 0.0
    assert loss.requires_grad
    assert torch.equal(torch.autograd.grad(loss, logits)[0], torch.zeros_like(logits))


@pytest.mark.parametrize("ignore_index", [255, -1, -100, 0])
def test_ignored_pixels_have_no_influence(ignore_index):
    logits, target = batch(4, "all_valid")
    hidden = torch.rand(target.shape, generator=torch.Generator().manual_seed(1)) < 0.5
    target = torch.where(hidden, ignore_index, target.clamp_min(1))
    loss = build_loss(CONFIGS["all"], 4, ignore_index)
    first = loss(logits, target)
    changed = torch.where(hidden[:, None], torch.full_like(logits, 50.0), logits)
    assert loss(changed, target).item() == first.item()
    gradient = torch.autograd.grad(first, logits)[0]
    assert (gradient.permute(0, 2, 3, 1)[hidden] == 0).all()


@pytest.mark.parametrize("classes", [1, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_extreme_logits_stay_finite(name, classes):
    logits = torch.tensor([1e4, -1e4, 0.0, 88.0, -88.0, 1e-8]).repeat(classes, 1).cumsum(0)
    logits = logits.view(1, classes, 1, 6).requires_grad_()
    for label in range(max(2, classes)):
        loss = build_loss(CONFIGS[name], classes)(logits, torch.full((1, 1, 6), label))
        assert loss.isfinite()
        assert torch.autograd.grad(loss, logits)[0].isfinite().all()


@pytest.mark.parametrize("name", CONFIGS)
def test_low_precision_logits_are_reduced_in_fp32_whatever_autocast_does(name):
    logits, target = batch(5)
    half = logits.detach().bfloat16().requires_grad_()
    exact = half.detach().float().requires_grad_()
    loss = build_loss(CONFIGS[name], 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = loss(half, target)
    assert low.dtype == torch.float32
    assert low.item() == loss(exact, target).item()
    gradient = torch.autograd.grad(low, half)[0]
    assert gradient.dtype == torch.bfloat16


def test_sums_keep_their_digits_over_millions_of_pixels():
    torch.manual_seed(0)
    logits = torch.zeros(1, 2, 1500, 2000)
    logits[:, 1] = torch.rand(1500, 2000) * 0.1
    target = torch.zeros(1, 1500, 2000, dtype=torch.long)
    target[:, 0, 0] = 1
    loss = build_loss(CONFIGS["ce_dice"], 2)
    expected = reference(CONFIGS["ce_dice"], logits, target)
    assert loss(logits, target).item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_small_integer_targets(dtype):
    logits, target = batch(5)
    loss = build_loss(CONFIGS["all"], 5)
    assert loss(logits, target.to(dtype)).item() == loss(logits, target).item()


# Parts of the pixels.


@pytest.mark.parametrize("name", CONFIGS)
def test_statistics_add_up(name):
    logits, target = batch(5, shape=(3, 12, 8))
    loss = build_loss(CONFIGS[name], 5)
    sums = None
    for image in range(3):
        for a, b in ((0, 5), (5, 6), (6, 12)):
            part = loss.statistics(logits[image : image + 1, :, a:b], target[image : image + 1, a:b])
            sums = add_sums(sums, part)
    assert sums["count"].dtype == torch.int64
    assert_agrees(loss.finish(sums), loss(logits, target), logits)


@pytest.mark.parametrize("weights", [None, [1.0, 0.0, 3.0, 0.5, 2.0]])
@pytest.mark.parametrize("name", ["ce", "ce_smoothed", "focal"])
def test_losses_divided_by_the_pixels_of_all_batches_add_up_to_the_whole(name, weights):
    logits, target = batch(5, shape=(4, 9, 8))
    target[1] = 255  # a micro-batch with nothing valid
    loss = build_loss({**CONFIGS[name], "class_weights": weights}, 5)
    pixels = loss.pixels(target)
    assert pixels.item() == pytest.approx(sum(loss.pixels(target[i : i + 1]).item() for i in range(4)))
    parts = sum(loss(logits[i : i + 1], target[i : i + 1], pixels) for i in range(4))
    assert_agrees(parts, loss(logits, target), logits)


def test_region_losses_of_parts_add_up_to_their_mean_by_pixels():
    logits, target = batch(5, shape=(2, 9, 8))
    target[1, :7] = 255
    loss = build_loss(CONFIGS["dice"], 5)
    pixels = [loss.pixels(target[i : i + 1]) for i in range(2)]
    alone = [loss(logits[i : i + 1], target[i : i + 1]) for i in range(2)]
    parts = sum(loss(logits[i : i + 1], target[i : i + 1], sum(pixels)) for i in range(2))
    expected = sum(n * value for n, value in zip(pixels, alone, strict=True)) / sum(pixels)
    assert_agrees(parts, expected, logits)


def test_wrong_shapes_are_refused():
    logits, target = batch(5)
    with pytest.raises(ValueError, match="do not fit"):
        build_loss(CONFIGS["ce"], 4)(logits, target)
    with pytest.raises(ValueError, match="do not fit"):
        build_loss(CONFIGS["ce"], 5)(logits[:, :, 1:], target)
    with pytest.raises(ValueError, match="3 class weights for 2 labels"):
        SegmentationLoss([WeightedTerm(1.0, CrossEntropy())], 1, class_weights=[1.0, 2.0, 3.0])


def test_a_label_that_is_no_class_raises():
    logits, target = batch(5, "all_valid")
    target[0, 0, 0] = 5
    with pytest.raises(RuntimeError, match="index 5 is out of bounds"):
        build_loss(CONFIGS["ce"], 5)(logits, target)


def test_class_weights_move_with_the_module_and_stay_out_of_weights_files():
    loss = build_loss({"terms": {"ce": 1.0}, "class_weights": [1.0, 2.0]}, 2)
    assert [name for name, _ in loss.named_buffers()] == ["class_weights"]
    assert loss.state_dict() == {}
