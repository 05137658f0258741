from types import SimpleNamespace

import pytest
import torch
from torch import nn

from seg4k.losses.loss import SegmentationLoss, WeightedTerm
from seg4k.losses.terms import CrossEntropy, Focal, Region
from seg4k.training.global_batch import GlobalBatch, finish_gradients
from seg4k.training.randomness import seed_micro_batch

CLASSES, SIZE, IMAGES = 3, (6, 5), 4


def batch():
    generator = torch.Generator().manual_seed(0)
    image = torch.rand(IMAGES, 2, *SIZE, generator=generator, dtype=torch.float64)
    mask = torch.randint(0, CLASSES, (IMAGES, *SIZE), generator=generator)
    for index, ignored in enumerate((0, 29, 11, 30)):  # the last image has no valid pixel at all
        mask[index].view(-1)[:ignored] = 255
    return image, mask


def gradients(terms, parts, weights=None):
    """Loss and gradients of one optimizer step over the batch cut into parts, as training takes it."""
    torch.manual_seed(1)
    model = nn.Conv2d(2, CLASSES, 3, padding=1).double()
    loss = SegmentationLoss(terms, CLASSES, class_weights=weights).double()
    image, mask = batch()
    step = GlobalBatch()
    for images, masks in zip(image.chunk(parts), mask.chunk(parts), strict=True):
        sums = loss.statistics(model(images), masks)
        part = loss.finish(sums, normalizer=masks.numel())
        step.add(part, sums["count"], loss.class_weights, masks.numel())
        (part / parts).backward()  # as Lightning divides
    totals = step.close()
    norm = finish_gradients(model.parameters(), totals.factor, 0.0)
    return totals.loss, [parameter.grad for parameter in model.parameters()], norm, model


@pytest.mark.parametrize("weights", [None, [0.2, 1.0, 3.0]])
@pytest.mark.parametrize("term", [CrossEntropy(), CrossEntropy(0.1), Focal()])
def test_gradients_are_those_of_the_big_batch_whatever_is_ignored(term, weights):
    terms = [WeightedTerm(1.0, term)]
    image, mask = batch()
    _, _, _, model = gradients(terms, 1, weights)
    plain = SegmentationLoss(terms, CLASSES, class_weights=weights).double()(model(image), mask)
    reference = torch.autograd.grad(plain, list(model.parameters()))
    for parts in (1, 2, 4):
        loss, got, norm, _ = gradients(terms, parts, weights)
        assert loss == pytest.approx(float(plain.detach()), rel=1e-12)
        for one, other in zip(got, reference, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-14)
        assert norm == pytest.approx(float(torch.cat([g.flatten() for g in reference]).norm()), rel=1e-12)


def test_cross_entropy_is_that_of_torch():
    image, mask = batch()
    loss, got, _, model = gradients([WeightedTerm(1.0, CrossEntropy())], 4)
    plain = nn.functional.cross_entropy(model(image), mask, ignore_index=255)
    assert loss == pytest.approx(float(plain.detach()), rel=1e-12)
    for one, other in zip(got, torch.autograd.grad(plain, list(model.parameters())), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-14)


def test_region_losses_are_the_mean_over_micro_batches_by_their_valid_pixels():
    terms = [WeightedTerm(1.0, Region(0.5, 0.5))]
    image, mask = batch()
    loss, got, _, model = gradients(terms, 4)
    plain = SegmentationLoss(terms, CLASSES).double()
    valid = (mask != 255).flatten(1).sum(1).double()
    each = torch.stack([plain(model(image[i : i + 1]), mask[i : i + 1]) for i in range(IMAGES)])
    mean = (each * valid).sum() / valid.sum()
    assert loss == pytest.approx(float(mean.detach()), rel=1e-12)
    for one, other in zip(got, torch.autograd.grad(mean, list(model.parameters())), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-14)


def test_a_step_without_a_valid_pixel_has_no_gradient():
    step = GlobalBatch()
    step.add(torch.tensor(0.0), torch.zeros(3, dtype=torch.int64), torch.ones(3), 30)
    totals = step.close()
    assert (totals.loss, totals.factor, totals.stop) == (0.0, 1.0, False)


@pytest.mark.parametrize("largest", [0.0, 0.5, 100.0])
def test_gradients_are_clipped_as_torch_clips_them(largest):
    torch.manual_seed(0)
    model, other = (nn.Linear(4, 3) for _ in range(2))
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        one.grad = torch.randn_like(one)
        two.grad = 2 * one.grad
    expected = float(torch.cat([p.grad.flatten() for p in other.parameters()]).norm())
    if largest:
        nn.utils.clip_grad_norm_(other.parameters(), largest)
    assert finish_gradients(model.parameters(), 2.0, largest) == pytest.approx(expected, rel=1e-6)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-6, atol=0)


def test_the_norm_of_offloaded_shards_is_added_up_where_the_processes_are_connected(monkeypatch):
    class Shard:
        """A gradient of fsdp with cpu_offload: in host memory, sharded over devices of another kind."""

        device_mesh = SimpleNamespace(device_type="meta")

        def to_local(self):
            return torch.ones(3)

    class Reached(Exception):
        pass

    def all_reduce(tensor):
        raise Reached(tensor.device.type)

    monkeypatch.setattr("seg4k.training.global_batch.DTensor", Shard)
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    with pytest.raises(Reached, match="meta"):
        finish_gradients([SimpleNamespace(grad=Shard())], 1.0, 0.0)


def test_draws_follow_from_seed_step_part_and_rank_alone():
    import random

    import numpy as np

    def draws(*place):
        seed_micro_batch(*place)
        return (float(torch.rand(())), float(np.random.rand()), random.random())

    first = draws(0, 3, 1, 0)
    torch.rand(100)
    assert draws(0, 3, 1, 0) == first
    others = [draws(*place) for place in ((1, 3, 1, 0), (0, 2, 1, 0), (0, 3, 0, 0), (0, 3, 1, 1))]
    assert len({first, *others}) == 5
