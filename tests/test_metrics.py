import copy
import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import multiprocessing
from torchmetrics.classification import MulticlassConfusionMatrix, MulticlassJaccardIndex

import seg4k.metrics
from seg4k.errors import UserError
from seg4k.metrics import ConfusionMatrix
from tests.processes import leave_at_once


def maps(classes, shape=(2, 13, 17), ignore_index=255, seed=0):
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(0, classes, shape, generator=generator)
    prediction = torch.randint(0, classes, shape, generator=generator)
    if ignore_index is not None:
        target[torch.rand(shape, generator=generator) < 0.2] = ignore_index
    return prediction, target


@pytest.mark.parametrize("classes", [2, 3, 19, 150])
@pytest.mark.parametrize("ignore_index", [255, -1, 0, -100, None])
def test_counts_equal_a_pixel_by_pixel_count(classes, ignore_index):
    prediction, target = maps(classes, ignore_index=ignore_index)
    expected = np.zeros((classes, classes), dtype=np.int64)
    for t, p in zip(target.flatten().tolist(), prediction.flatten().tolist(), strict=True):
        if t != ignore_index:
            expected[t, p] += 1
    metric = ConfusionMatrix(classes, ignore_index)
    metric.update(prediction, target)
    assert metric.matrix.dtype == torch.int64
    np.testing.assert_array_equal(metric.matrix.numpy(), expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_small_integer_types_do_not_overflow(dtype):
    prediction, target = maps(100)
    reference = MulticlassConfusionMatrix(100, ignore_index=255)
    reference.update(prediction, target)
    metric = ConfusionMatrix(100)
    metric.update(prediction.to(dtype), target.to(dtype))
    assert torch.equal(metric.matrix, reference.confmat)


def test_chunks_do_not_show(monkeypatch):
    prediction, target = maps(5, (3, 40, 41))
    whole = ConfusionMatrix(5)
    whole.update(prediction, target)
    monkeypatch.setattr(seg4k.metrics, "_CPU_CHUNK", 37)
    chunked = ConfusionMatrix(5)
    chunked.update(prediction, target)
    assert torch.equal(whole.matrix, chunked.matrix)


@given(cuts=st.lists(st.integers(1, 11), max_size=6), order=st.randoms(use_true_random=False))
@settings(max_examples=30, deadline=None)
def test_scores_do_not_depend_on_how_the_pixels_are_cut(cuts, order):
    prediction, target = maps(4, (1, 12, 9), seed=3)
    whole = ConfusionMatrix(4)
    whole.update(prediction, target)
    edges = [0, *sorted(set(cuts)), 12]
    parts = list(itertools.pairwise(edges))
    order.shuffle(parts)
    pieces = ConfusionMatrix(4)
    for a, b in parts:
        pieces.update(prediction[:, a:b], target[:, a:b])
    assert torch.equal(whole.matrix, pieces.matrix)
    assert whole.miou() == pieces.miou()


def test_iou_against_torchmetrics_where_every_class_occurs():
    prediction, target = maps(6, (2, 60, 60))
    metric = ConfusionMatrix(6)
    metric.update(prediction, target)
    reference = MulticlassJaccardIndex(6, average=None, ignore_index=255)
    torch.testing.assert_close(metric.iou().float(), reference(prediction, target))
    assert metric.miou().item() == pytest.approx(reference(prediction, target).mean().item())


def test_an_absent_class_is_nan_and_left_out_of_the_mean():
    target = torch.tensor([[[0, 0, 1, 255]]])
    prediction = torch.tensor([[[0, 1, 1, 2]]])
    metric = ConfusionMatrix(4)
    metric.update(prediction, target)
    assert metric.iou()[:2].tolist() == [0.5, 0.5]
    assert metric.iou()[2:].isnan().all()  # class 2 was predicted on an ignored pixel only
    assert metric.miou().item() == 0.5
    assert metric.accuracy().item() == pytest.approx(2 / 3)


def test_a_class_predicted_but_never_true_counts_as_zero():
    metric = ConfusionMatrix(3)
    metric.update(torch.tensor([[[0, 2]]]), torch.tensor([[[0, 0]]]))
    assert metric.iou()[0] == 0.5
    assert metric.iou()[1].isnan()
    assert metric.iou()[2] == 0.0
    assert metric.miou() == 0.25


def test_nothing_valid_is_nan_and_reset_forgets():
    metric = ConfusionMatrix(2)
    metric.update(torch.zeros(1, 2, 2, dtype=torch.long), torch.full((1, 2, 2), 255))
    assert math.isnan(metric.miou().item())
    assert math.isnan(metric.accuracy().item())
    metric.update(*maps(2))
    metric.reset()
    assert metric.matrix.sum() == 0


def test_counts_stay_exact_beyond_the_range_of_floats():
    metric = ConfusionMatrix(2)
    metric.matrix[0, 0] = 2**53
    metric.update(torch.tensor([[[0]]]), torch.tensor([[[0]]]))
    assert metric.matrix[0, 0].item() == 2**53 + 1


@pytest.mark.parametrize(
    ("ignore_index", "label"), [(255, 3), (255, -1), (255, 254), (None, 255), (-1, 3), (0, -1)]
)
def test_a_label_out_of_range_is_named_and_nothing_is_counted(ignore_index, label):
    metric = ConfusionMatrix(3, ignore_index)
    with pytest.raises(UserError, match=rf"label {label}, but the labels are 0 to 2"):
        metric.update(torch.zeros(1, 1, 2, dtype=torch.long), torch.tensor([[[1, label]]]))
    assert metric.matrix.sum() == 0


def test_wrong_calls_are_refused():
    metric = ConfusionMatrix(3)
    with pytest.raises(ValueError, match="differ"):
        metric.update(torch.zeros(1, 2, 2, dtype=torch.long), torch.zeros(1, 2, 3, dtype=torch.long))
    with pytest.raises(ValueError, match=r"predicted labels lie in \[0, 3\]"):
        metric.update(torch.tensor([[[0, 3]]]), torch.tensor([[[0, 0]]]))
    with pytest.raises(ValueError, match="at least 2 classes"):
        ConfusionMatrix(1)


def test_the_matrix_is_a_buffer_outside_the_state_dict():
    metric = ConfusionMatrix(3)
    assert [name for name, _ in metric.named_buffers()] == ["matrix"]
    assert metric.state_dict() == {}
    assert copy.deepcopy(metric).to("meta").matrix.device.type == "meta"


def test_all_reduce_without_processes_keeps_the_counts_and_guards_against_double_counting():
    metric = ConfusionMatrix(2)
    metric.update(*maps(2))
    before = metric.matrix.clone()
    metric.all_reduce()
    assert torch.equal(metric.matrix, before)
    with pytest.raises(RuntimeError, match="reset"):
        metric.all_reduce()
    with pytest.raises(RuntimeError, match="reset"):
        metric.update(*maps(2))
    metric.reset()
    metric.update(*maps(2))


def _count_in_process(rank: int, folder: str) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    prediction, target = maps(5, (3, 8, 8))
    metric = ConfusionMatrix(5)
    share = slice(0, 2) if rank == 0 else slice(2, 3)
    metric.update(prediction[share], target[share])
    metric.all_reduce()
    torch.save(metric.matrix, Path(folder) / f"{rank}.pt")
    leave_at_once()


def test_two_processes_give_what_one_gives(tmp_path):
    multiprocessing.spawn(_count_in_process, args=(str(tmp_path),), nprocs=2)
    alone = ConfusionMatrix(5)
    alone.update(*maps(5, (3, 8, 8)))
    for rank in range(2):
        assert torch.equal(torch.load(tmp_path / f"{rank}.pt", weights_only=True), alone.matrix)
