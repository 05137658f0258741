import multiprocessing
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from seg4k.data import cache as caches
from seg4k.data.build import build_datamodule
from seg4k.data.cache import ArrayCache, open_cache
from seg4k.errors import UserError

from .conftest import noise_pair, write


def epoch(root, **config):
    settings = {
        "name": "folder",
        "root": str(root),
        "image_size": [16, 16],
        "samples_per_epoch": 20,
        **config,
    }
    data = build_datamodule(settings, seed=0, batch_size=2)
    batches = [*data.train_dataloader(), *data.val_dataloader()]
    return data, batches


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["ram", "disk"])
def test_the_epoch_is_the_same_with_any_cache(make_folder, tmp_path, kind, workers):
    root = make_folder()
    augment = {"hflip": 0.5, "scale": [0.7, 1.4], "colour": 0.5, "brightness": 0.2}
    _, expected = epoch(root, augment=augment)
    config = {"cache": kind, "cache_dir": str(tmp_path / "kept"), "augment": augment, "num_workers": workers}
    for _ in range(2):  # the second time all of it comes from the cache
        data, got = epoch(root, **config)
        for a, b in zip(expected, got, strict=True):
            assert a["name"] == b["name"]
            assert torch.equal(a["image"], b["image"])
            assert torch.equal(a["mask"], b["mask"])
    cache = data.source.reader.cache
    assert len(list(cache.folder.glob("*.npy"))) == 2 * 8
    assert (cache.folder.parent == tmp_path / "kept") is (kind == "disk")


def test_a_file_is_decoded_once_until_it_changes(tmp_path):
    cache, made = ArrayCache(tmp_path, 10**6), []
    source = tmp_path / "a.png"
    source.write_bytes(b"1")

    def make():
        made.append(1)
        return np.full((4, 5), len(made), np.uint16)

    first = cache.array(source, "image", make)
    again = cache.array(source, "image", make)
    np.testing.assert_array_equal(first, again)
    assert again.dtype == np.uint16
    assert not again.flags.writeable
    assert type(again) is np.ndarray
    cache.array(source, "mask", make)
    assert len(made) == 2
    source.write_bytes(b"22")
    assert cache.array(source, "image", make)[0, 0] == 3
    assert len(list(tmp_path.glob("*.npy"))) == 2  # the stale one is gone
    os.utime(source, ns=(1, 1))
    assert cache.array(source, "image", make)[0, 0] == 4
    (entry,) = [p for p in tmp_path.glob("*.npy") if np.load(p)[0, 0] == 4]
    entry.write_bytes(entry.read_bytes()[:140])  # damaged: decoded anew
    assert cache.array(source, "image", make)[0, 0] == 5
    with pytest.raises(UserError):
        cache.array(tmp_path / "gone", "image", lambda: (_ for _ in ()).throw(UserError("gone")))


def test_the_bound_is_kept(tmp_path):
    cache = ArrayCache(tmp_path / "kept", 10_000)
    cache.folder.mkdir()
    for number in range(20):
        source = tmp_path / f"{number}"
        source.write_bytes(b"x")
        array = cache.array(source, "image", lambda n=number: np.full(2000, n, np.uint8))
        assert (array == number).all()
        assert cache.held_bytes() <= 10_000
    assert len(list(cache.folder.glob("*.npy"))) == 4
    assert not list(cache.folder.glob(".*.npy"))


def _fill(folder, sources):
    cache = ArrayCache(folder, 50_000)
    for number, source in enumerate(sources):
        cache.array(source, "image", lambda n=number: np.full(1000, n, np.uint8))


def test_processes_at_once_keep_the_bound_and_whole_files(tmp_path):
    folder = tmp_path / "kept"
    folder.mkdir()
    sources = [tmp_path / f"{number}" for number in range(100)]
    for source in sources:
        source.write_bytes(b"x")
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_fill, args=(folder, sources)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    cache = ArrayCache(folder, 50_000)
    assert cache.held_bytes() <= 50_000
    kept = list(folder.glob("*.npy"))
    assert 30 <= len(kept) <= 50
    assert all(len(set(np.load(path).tolist())) == 1 for path in kept)


def test_no_room_on_the_disk_is_no_fault(tmp_path, monkeypatch):
    source = tmp_path / "a"
    source.write_bytes(b"x")
    cache = ArrayCache(tmp_path, 10**6)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np.lib.format, "write_array", full)
    assert cache.array(source, "image", lambda: np.arange(5)).tolist() == [0, 1, 2, 3, 4]
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".npy"] == []


def test_memory_is_given_back(tmp_path, make_folder, monkeypatch, capsys):
    """At the end of a process; and where it was killed, by the next one."""
    code = (
        "import sys, os, signal; from pathlib import Path; from seg4k.data.cache import open_cache\n"
        "made = open_cache('ram', 10**6, None, Path('.'))\n"
        "print(made.folder, flush=True)\n"
        "if len(sys.argv) > 1: os.kill(os.getpid(), signal.SIGKILL)"
    )

    def folder_of(*arguments):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
        return caches.Path(done.stdout.strip())

    assert not folder_of().exists()
    left = folder_of("killed")
    assert left.is_dir()
    mine = open_cache("ram", 10**6, None, tmp_path)
    assert not left.exists()
    open_cache("ram", 10**6, None, tmp_path)
    assert mine.folder.is_dir()  # alive
    open_cache("ram", 10**18, None, tmp_path)
    assert "has room for" in capsys.readouterr().err


@pytest.mark.parametrize(("most", "each"), [(800, 200), (10_000, 250)])
def test_processes_of_a_machine_share_its_memory(tmp_path, monkeypatch, most, each):
    """Together they take what is allowed, and no more than half of what is free."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(caches.shutil, "disk_usage", lambda _: SimpleNamespace(free=2000))
    made = open_cache("ram", most, None, tmp_path)
    assert made.most_bytes == each


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"data.cache=disk cannot write to .*set data.cache_dir=FOLDER"):
        open_cache("disk", 10**6, tmp_path / "file", tmp_path)
    stale = open_cache("disk", 10**6, tmp_path / "c", tmp_path).folder / ".x.npy"
    stale.write_bytes(b"left")
    os.utime(stale, (time.time() - 10**5,) * 2)
    open_cache("disk", 10**6, tmp_path / "c", tmp_path)
    assert not stale.exists()


def test_only_what_a_crop_needs_is_read_from_a_mapped_file(tmp_path):
    generator = np.random.default_rng(0)
    image, _ = noise_pair(generator, (64, 64))
    write(tmp_path / "a.png", image)
    cache = ArrayCache(tmp_path / "kept", 10**7)
    cache.folder.mkdir()
    cache.array(tmp_path / "a.png", "image", lambda: image)
    mapped = cache.array(tmp_path / "a.png", "image", lambda: image)
    base = mapped
    while isinstance(base.base, np.ndarray):
        base = base.base
    assert isinstance(base, np.memmap)
