import itertools
import pickle

import cv2
import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from seg4k.data.build import build_datamodule
from seg4k.data.images import WrongDepthError, read_image, read_mask
from seg4k.errors import UserError

from .conftest import write, write_classes

AUGMENT = {"hflip": 0.5, "vflip": 0.5, "rotate90": 0.5, "colour": 0.5, "brightness": 0.2, "scale": [0.7, 1.4]}


def build(root, *, seed=0, batch_size=2, accumulate=1, **config):
    config = {"name": "folder", "root": str(root), "image_size": [16, 16], **config}
    return build_datamodule(config, seed=seed, batch_size=batch_size, accumulate=accumulate)


def marble_config(root, **config):
    return {"name": "blue_marble", "root": str(root), "image_size": [64, 64], **config}


def epoch_of(datamodule, epoch=0):
    loader = datamodule.train_dataloader()
    loader.sampler.set_epoch(epoch)
    return list(loader)


def same(first, second):
    assert [b["name"] for b in first] == [b["name"] for b in second]
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a["image"], b["image"])
        assert torch.equal(a["mask"], b["mask"])


def test_batches_are_as_agreed(make_folder):
    datamodule = build(make_folder(), augment=AUGMENT)
    datamodule.prepare_data()
    datamodule.setup("fit")
    assert datamodule.in_channels == 3
    assert datamodule.class_table.names == ("low", "high", "top")
    batches = epoch_of(datamodule)
    assert len(batches) == len(datamodule.train_dataloader()) == 3  # 5 images, filled up to whole steps
    for batch in (*batches, *datamodule.val_dataloader()):
        assert set(batch) == {"image", "mask", "name"}
        assert batch["image"].dtype == torch.uint8
        assert batch["mask"].dtype == torch.int64
        assert all(isinstance(name, str) for name in batch["name"])
        assert batch["image"].shape[0] == batch["mask"].shape[0] == len(batch["name"])
        assert batch["image"].shape[2:] == batch["mask"].shape[1:]
    assert batches[0]["image"].shape == (2, 3, 16, 16)


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_do_not_change_the_samples(make_folder, workers):
    root = make_folder()
    options = {"augment": AUGMENT, "samples_per_epoch": 12, "rare_crop_share": 0.3, "rare_classes": ["top"]}
    alone, helped = build(root, **options), build(root, num_workers=workers, **options)
    loader = helped.train_dataloader()
    epochs = []
    for epoch in (0, 3):  # the workers persist, and are told the epoch with each sample
        loader.sampler.set_epoch(epoch)
        epochs.append(list(loader))
        same(epoch_of(alone, epoch), epochs[-1])
    assert epochs[0][0]["name"] != epochs[1][0]["name"]
    same(list(alone.val_dataloader()), list(helped.val_dataloader()))


def test_a_dataset_can_be_sent_to_a_new_process(marble):
    config = marble_config(marble, rare_crop_share=0.5, rare_classes=["lake"], augment=AUGMENT)
    dataset = build_datamodule(config, seed=0, batch_size=2).train_dataset()
    first = dataset[0, 0]
    sent = pickle.dumps(dataset)
    assert len(sent) < 100_000  # without pixels
    assert torch.equal(pickle.loads(sent)[0, 0]["image"], first["image"])


def test_the_pixels_in_memory_stay_as_they_are(marble):
    augment = {**AUGMENT, "colour": 1.0, "contrast": 0.2, "saturation": 0.2, "hue": 0.1, "scale": [1, 1]}
    dataset = build_datamodule(marble_config(marble, augment=augment), seed=0, batch_size=2).train_dataset()
    before = [part.copy() for part in dataset.scenes[0].arrays()]
    for index in range(300):
        sample = dataset[0, index]
        sample["image"][:], sample["mask"][:] = 7, 7  # samples share no memory with the scene
    for part, kept in zip(dataset.scenes[0].arrays(), before, strict=True):
        np.testing.assert_array_equal(part, kept)


def test_seeds_and_only_seeds_change_the_samples(make_folder):
    root = make_folder()
    same(epoch_of(build(root, augment=AUGMENT)), epoch_of(build(root, augment=AUGMENT)))
    other = epoch_of(build(root, augment=AUGMENT, seed=1))
    assert [b["name"] for b in other] != [b["name"] for b in epoch_of(build(root, augment=AUGMENT))]


@pytest.mark.parametrize("world", [2, 3])
def test_processes_see_together_what_one_sees(make_folder, monkeypatch, world):
    root = make_folder(train=7, val=4)
    options = {"samples_per_epoch": 13, "val_size": [16, 24], "augment": AUGMENT}
    one = build(root, batch_size=2 * world, **options)
    many = [build(root, **options) for _ in range(world)]
    accumulated = build(root, batch_size=1, accumulate=2 * world, **options)
    for rank, datamodule in enumerate(many):
        monkeypatch.setattr(datamodule, "_place", lambda rank=rank: (rank, world))
    whole = epoch_of(one, 5)
    parts = [epoch_of(datamodule, 5) for datamodule in many]
    pieces = iter(epoch_of(accumulated, 5))
    for step, batch in enumerate(whole):
        names = sorted(batch["name"])
        assert names == sorted(n for part in parts for n in part[step]["name"])
        assert names == sorted(n for piece in itertools.islice(pieces, 2 * world) for n in piece["name"])
    assert not list(pieces)
    tiles = sorted(n for b in one.val_dataloader() for n in b["name"])
    loaders = [list(datamodule.val_dataloader()) for datamodule in many]
    assert len({tuple(b["image"].shape for b in loader) for loader in loaders}) == 1  # in step
    seen = [n for loader in loaders for b in loader for n in b["name"]]
    assert sorted(n for n in seen if n != "padding") == tiles
    for batch in itertools.chain(*loaders):
        for name, mask in zip(batch["name"], batch["mask"], strict=True):
            assert name != "padding" or (mask == 255).all()


def test_validation_covers_the_images(make_folder):
    root = make_folder(val=2, size=(40, 56))
    truth = [read_mask(root / f"masks/val/val{i}.png") for i in range(2)]
    counts = sum(np.bincount(mask.ravel(), minlength=3) for mask in truth)
    for size in (None, [40, 56], [16, 16], [100, 7]):
        got = torch.zeros(256, dtype=torch.long)
        for batch in build(root, val_size=size).val_dataloader():
            got += torch.bincount(batch["mask"].ravel(), minlength=256)
        assert got[:3].tolist() == counts.tolist()
    whole = next(iter(build(root, batch_size=1).val_dataloader()))
    image = torch.from_numpy(read_image(root / "images/val/val0.png")).permute(2, 0, 1)
    assert torch.equal(whole["image"][0], image)
    assert whole["name"] == ["val0"]


def test_whole_images_of_different_sizes_come_one_by_one(make_folder):
    root = make_folder(val=3)
    write(root / "images/val/val1.png", np.zeros((20, 30, 3), np.uint8))
    write(root / "masks/val/val1.png", np.zeros((20, 30), np.uint8))
    shapes = [tuple(b["image"].shape) for b in build(root).val_dataloader()]
    assert shapes == [(1, 3, 40, 56), (1, 3, 20, 30), (1, 3, 40, 56)]


@pytest.mark.parametrize(("bits", "channels"), [(16, 3), (16, 1), (8, 4), (16, 4)])
def test_other_depths_and_channels(make_folder, bits, channels):
    root = make_folder(bits=bits, channels=channels)
    datamodule = build(root, augment={"hflip": 0.5, "rotate90": 1.0})
    assert datamodule.in_channels == channels
    batch = next(iter(datamodule.val_dataloader()))
    assert batch["image"].dtype == (torch.uint8 if bits == 8 else torch.float32)
    image = read_image(root / "images/val/val0.png").transpose(2, 0, 1) / (1 if bits == 8 else 65535)
    np.testing.assert_allclose(batch["image"][0].numpy(), image, rtol=1e-6)
    assert next(iter(datamodule.train_dataloader()))["image"].shape == (2, channels, 16, 16)
    with pytest.raises(
        UserError, match=rf"these have {channels} of {bits} bits: set data\.augment\.colour=0"
    ):
        build(root, augment={"colour": 0.5, "hue": 0.1}).setup("fit")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_damaged_image_ends_the_epoch_with_its_name_alone(make_folder, workers):
    root = make_folder(train=6)
    datamodule = build(root, num_workers=workers)
    datamodule.setup("fit")
    path = root / "images/train/train4.png"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(UserError, match=r"^\S*train4\.png cannot be decoded .* remove the file\.$"):
        epoch_of(datamodule)


def test_a_mistake_of_another_kind_ends_it_with_its_name_alone_too(make_folder):
    root = make_folder(train=6)
    datamodule = build(root, num_workers=1)
    datamodule.setup("fit")
    deep = cv2.imencode(".tif", np.ones((40, 56), np.float32))[1].tobytes()
    (root / "images/train/train4.png").write_bytes(deep)
    with pytest.raises(WrongDepthError, match=r"^\S*train4\.png holds float32 values; save .* channel\.$"):
        epoch_of(datamodule)


class Recorder(LightningModule):
    """Writes down the names of its batches; its one weight is the sum of what it saw."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: list[list[str]] = []

    def training_step(self, batch, index):
        self.seen.append([f"{self.current_epoch}:{index}", *batch["name"]])
        return (self.weight * batch["image"].float().mean()).sum()

    def validation_step(self, batch, index):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SaveEachStep(Callback):
    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_end(self, trainer, *_):
        trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


def fit(datamodule, *, steps, save=None, resume=None, **options):
    module = Recorder()
    trainer = Trainer(
        accelerator="cpu",
        max_steps=steps,
        max_epochs=-1,
        callbacks=[SaveEachStep(save)] if save else [],
        enable_checkpointing=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        **options,
    )
    trainer.fit(module, datamodule, ckpt_path=resume)
    return module


@pytest.mark.filterwarnings(
    "ignore:.*does not have many workers.*",
    "ignore:.*LeafSpec.*:FutureWarning",  # Lightning with a newer torch
)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("options", [{}, {"limit_train_batches": 3, "limit_val_batches": 0}])
def test_a_resumed_run_sees_the_rest_of_the_epoch(make_folder, tmp_path, workers, options):
    root = make_folder(train=10)

    def datamodule():
        return build(root, augment=AUGMENT, num_workers=workers)

    whole = fit(datamodule(), steps=12, save=tmp_path, **options)
    assert len(whole.seen) == 12
    assert len({tuple(s[1:]) for s in whole.seen}) == 12
    # Within an epoch (of 5 steps, or 3), at its last step, and at the first of the next.
    for step in (2, 3, 5, 6, 7):
        rest = fit(datamodule(), steps=12, resume=tmp_path / f"{step}.ckpt", **options)
        assert rest.seen == whole.seen[step:]
        assert torch.equal(rest.weight, whole.weight)


def test_pictures_prefer_samples_of_several_classes(marble):
    datamodule = build_datamodule(marble_config(marble, val_size=[256, 256]), seed=0, batch_size=1)
    samples = datamodule.sample_for_picture(3)
    assert len(samples) == 3
    for sample in samples:
        assert sample["image"].shape == (3, 256, 256)
        assert sample["mask"].dtype == torch.int64
        assert set(sample["mask"].unique().tolist()) >= {0, 1, 2}
    assert len({sample["name"] for sample in samples}) == 3


def test_few_validation_samples_make_few_pictures(make_folder):
    assert len(build(make_folder(val=2)).sample_for_picture(5)) == 2


def test_blue_marble_crops_of_lakes(marble):
    def share(rare):
        config = marble_config(marble, samples_per_epoch=400, rare_crop_share=rare, rare_classes=["lake"])
        loader = build_datamodule(config, seed=0, batch_size=20).train_dataloader()
        return sum(int((b["mask"] == 2).flatten(1).any(1).sum()) for b in loader) / 400

    assert share(0.0) < 0.2
    assert share(0.5) > 0.45
    assert share(1.0) == 1.0


def test_whole_4k_crops_of_blue_marble(marble):
    config = marble_config(marble, image_size=[2160, 3840], augment={"rotate90": 1.0, "hflip": 0.5})
    batch = next(iter(build_datamodule(config, seed=0, batch_size=1).train_dataloader()))
    assert batch["image"].shape == (1, 3, 2160, 3840)
    assert (batch["mask"] < 3).all()


def test_too_few_samples_for_a_step(make_folder):
    with pytest.raises(
        UserError, match=r"has 3 samples, fewer than the 8 .* data.samples_per_epoch to at least 8"
    ):
        build(make_folder(), samples_per_epoch=3, batch_size=4, accumulate=2).train_dataloader()


def test_classes_that_are_nowhere_cannot_be_rare(make_folder):
    root = make_folder()
    write_classes(root, ["low", "high", "top", "never"])
    with pytest.raises(UserError, match="'never' is in no training mask"):
        build(root, rare_crop_share=0.1, rare_classes=["never"]).setup("fit")
