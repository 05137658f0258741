import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seg4k.data.sampling import (
    PADDING,
    EpochSampler,
    EverySampleSampler,
    epoch_order,
    sample_generator,
    scene_order,
)
from seg4k.errors import UserError

counts = st.integers(1, 200)
worlds = st.integers(1, 8)
seeds = st.integers(0, 2**40)
epochs = st.integers(0, 1000)


@given(counts, seeds, epochs)
def test_one_process_takes_every_index_once(count, seed, epoch):
    sampler = EpochSampler(count, seed=seed)
    sampler.set_epoch(epoch)
    keys = list(sampler)
    assert len(keys) == len(sampler) == count
    assert {index for _, index in keys} == set(range(count))
    assert {e for e, _ in keys} == {epoch}


@given(counts, worlds, st.integers(1, 5), seeds, epochs)
def test_processes_share_an_epoch_without_overlap(count, world, batch, seed, epoch):
    multiple = world * batch
    if count < multiple:
        with pytest.raises(UserError, match=f"fewer than the {multiple}"):
            EpochSampler(count, seed=seed, world=world, multiple=multiple)
        return
    ranks = [EpochSampler(count, seed=seed, rank=r, world=world, multiple=multiple) for r in range(world)]
    for sampler in ranks:
        sampler.set_epoch(epoch)
    taken = [[index for _, index in sampler] for sampler in ranks]
    total = count // multiple * multiple
    assert [len(t) for t in taken] == [len(s) for s in ranks] == [total // world] * world
    assert len(set().union(*taken)) == total
    # The same samples in the same steps as one process with the whole batch.
    whole = [index for _, index in _at(EpochSampler(count, seed=seed, multiple=multiple), epoch)]
    for step in range(total // multiple):
        parts = [index for t in taken for index in t[step * batch : (step + 1) * batch]]
        assert sorted(parts) == sorted(whole[step * multiple : (step + 1) * multiple])


@given(counts, worlds, seeds, epochs, st.data())
def test_resuming_anywhere_gives_the_tail(count, world, seed, epoch, data):
    count = max(count, world)
    rank = data.draw(st.integers(0, world - 1))
    start = data.draw(st.integers(0, count // world)) * world
    whole = list(_at(EpochSampler(count, seed=seed, rank=rank, world=world), epoch))
    resumed = EpochSampler(count, seed=seed, rank=rank, world=world)
    resumed.load_state_dict({"epoch": epoch, "start_sample": start})
    resumed.set_epoch(epoch)  # as the trainer does; the same epoch keeps the place
    assert list(resumed) == whole[start // world :]
    assert len(resumed) == len(whole)
    resumed.set_epoch(epoch + 1)
    assert resumed.state_dict() == {"epoch": epoch + 1, "start_sample": 0}
    assert len(list(resumed)) == len(whole)


@given(counts, seeds)
def test_epochs_and_seeds_differ(count, seed):
    orders = {tuple(epoch_order(s, e, count)) for s in (seed, seed + 1) for e in range(3)}
    assert count < 10 or len(orders) == 6


def test_the_order_is_the_same_in_every_version():
    # Published runs can be repeated: a change of these numbers is a change of every run.
    assert epoch_order(0, 0, 8).tolist() == [5, 0, 1, 4, 2, 6, 3, 7]
    assert epoch_order(3, 7, 5).tolist() == [4, 3, 2, 1, 0]
    assert sample_generator(0, 0, 0).integers(1000, size=3).tolist() == [837, 261, 109]


def test_uses_of_the_seed_do_not_coincide():
    # numpy pads a short seed with zeros.
    order = np.random.default_rng((1, 5, 0))
    streams = [sample_generator(5, 0, 0), sample_generator(5, 0, 1), sample_generator(5, 1, 0), order]
    assert len({tuple(g.integers(2**60, size=4)) for g in streams}) == 4
    assert sorted(scene_order(5, 0, 0, 9)) == list(range(9))
    assert scene_order(5, 0, 0, 90).tolist() != scene_order(5, 0, 1, 90).tolist()


@given(st.integers(0, 100), worlds)
def test_validation_takes_every_sample_once_over_the_processes(count, world):
    taken = [[i for _, i in EverySampleSampler(count, rank=r, world=world)] for r in range(world)]
    assert len({len(t) for t in taken}) == 1
    real = [index for t in taken for index in t if index != PADDING]
    assert sorted(real) == list(range(count))
    assert len(EverySampleSampler(count, world=world)) == len(taken[0])
    assert len(taken[0]) * world - count < world


def test_a_rank_outside_the_world_is_refused():
    with pytest.raises(ValueError, match="rank 2"):
        EpochSampler(4, seed=0, rank=2, world=2)


def _at(sampler, epoch):
    sampler.set_epoch(epoch)
    return sampler
