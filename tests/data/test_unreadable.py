import pytest
import torch

from seg4k.data import unreadable
from seg4k.errors import UserError
from tests.data.fatal import FatalReader

from .test_datamodule import build, epoch_of, same


@pytest.fixture(autouse=True)
def nothing_named(monkeypatch):
    monkeypatch.setattr(unreadable, "_named", set())


@pytest.fixture
def damaged(make_folder):
    """A training image cut short, and a validation mask; their headers are whole."""
    root = make_folder(train=5, val=3)
    for path in (root / "images" / "train" / "train1.png", root / "masks" / "val" / "val2.png"):
        path.write_bytes(path.read_bytes()[:200])
    return root


@pytest.mark.parametrize("workers", [0, 2])
def test_a_damaged_image_ends_the_epoch_and_is_named(damaged, workers):
    datamodule = build(damaged, num_workers=workers)
    datamodule.setup("fit")
    with pytest.raises(UserError, match=r"train1\.png cannot be decoded"):
        epoch_of(datamodule)
    with pytest.raises(UserError, match=r"val2\.png cannot be decoded"):
        list(datamodule.val_dataloader())


def test_or_is_named_once_and_replaced(damaged, caplog):
    datamodule = build(damaged, on_error="skip", samples_per_epoch=10)
    datamodule.setup("fit")
    batches = epoch_of(datamodule)
    names = [name.partition("@")[0] for batch in batches for name in batch["name"]]
    assert len(names) == 10
    assert set(names) == {"train0", "train2", "train3", "train4"}
    assert caplog.text.count("train1.png cannot be decoded") == 1
    # Samples that can be read are those of any run, and the replacements follow from (seed, epoch, index).
    same(batches, epoch_of(build(damaged, on_error="skip", samples_per_epoch=10, num_workers=1)))
    same(batches, epoch_of(build(damaged, on_error="skip", samples_per_epoch=10, batch_size=2)))
    assert names != [n.partition("@")[0] for b in epoch_of(datamodule, 1) for n in b["name"]]


def test_a_tile_that_cannot_be_read_counts_for_nothing(damaged, caplog):
    datamodule = build(damaged, on_error="skip", batch_size=1)
    datamodule.setup("fit")
    first, second, third = datamodule.val_dataloader()
    assert (first["name"], second["name"], third["name"]) == (["val0"], ["val1"], ["padding"])
    assert third["image"].shape == first["image"].shape
    assert third["image"].dtype == first["image"].dtype
    assert torch.all(third["mask"] == 255)
    assert "val2.png" in caplog.text


def test_rare_classes_are_sought_in_what_can_be_read(damaged):
    path = damaged / "masks" / "train" / "train3.png"
    path.write_bytes(path.read_bytes()[:200])
    options = {"rare_crop_share": 1.0, "rare_classes": ["top"], "samples_per_epoch": 10}
    with pytest.raises(UserError, match=r"train3\.png"):
        build(damaged, **options).setup("fit")
    datamodule = build(damaged, on_error="skip", **options)
    datamodule.setup("fit")
    names = {name.partition("@")[0] for batch in epoch_of(datamodule) for name in batch["name"]}
    assert names <= {"train0", "train2", "train4"}


def test_files_without_a_header_too(make_folder, caplog):
    root = make_folder(train=3, val=2)
    (root / "images" / "train" / "train0.png").write_bytes(b"")
    with pytest.raises(UserError, match=r"train0\.png"):
        build(root)
    datamodule = build(root, on_error="skip")
    datamodule.setup("fit")
    assert len(datamodule.train_dataset().scenes) == 2
    for name in ("train1", "train2"):
        (root / "images" / "train" / f"{name}.png").write_bytes(b"")
    with pytest.raises(UserError, match=r"train2\.png is empty"):
        build(root, on_error="skip")


def test_where_every_image_is_damaged_the_epoch_ends(make_folder):
    root = make_folder(train=2, val=1)
    datamodule = build(root, on_error="skip")
    datamodule.setup("fit")
    for path in (root / "images" / "train").iterdir():
        path.write_bytes(path.read_bytes()[:200])
    datamodule.source.reader.__dict__.update(datamodule.source.reader.__getstate__())
    with pytest.raises(UserError, match="cannot be decoded"):
        epoch_of(datamodule)


def test_an_unknown_policy(make_folder):
    with pytest.raises(UserError, match="stop or skip"):
        build(make_folder(), on_error="ignore")


def test_a_worker_that_is_killed_names_the_file(make_folder):
    datamodule = build(make_folder(train=4, val=1), num_workers=1)
    reader = datamodule.source.reader
    datamodule.source.reader = FatalReader(reader.labelling, reader.channels, reader.dtype)
    loader = datamodule.train_dataloader()
    # The first image is read here, to know its type: it must not be the fatal one.
    with pytest.raises(RuntimeError, match=r"status -9 while it read .*train2\.png"):
        list(loader)
