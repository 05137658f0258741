import json
import shutil

import cv2
import numpy as np
import pytest

from seg4k.cli import main
from seg4k.data.formats import NAMES
from tests.data import layouts
from tests.data.layouts import LAYOUTS, SIZE

# rasterio multiplies transforms in a way that newer versions of affine warn of.
pytestmark = pytest.mark.filterwarnings("ignore:Use `@` matmul:PendingDeprecationWarning")


def check(tmp_path, name, root, *overrides):
    output = tmp_path / "out"
    shutil.rmtree(output, ignore_errors=True)
    status = main(
        ["check-data", f"data={name}", f"data.root={root}", f"output={output}", "threads=2", *overrides]
    )
    return status, json.loads((output / "check.json").read_text())


@pytest.mark.parametrize("name", NAMES)
def test_a_good_set_of_each_format_is_clean(tmp_path, name, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = LAYOUTS[name](tmp_path / "set")
    status, report = check(tmp_path, name, made.root)
    out = capsys.readouterr().out
    assert status == 0, out
    assert report["faults"] == []
    assert report["passed"] is True
    assert report["images"] == {"train": 2, "val": 1}
    assert report["sizes"] == [{"height": SIZE[0], "width": SIZE[1], "images": 3}]
    assert "nothing wrong" in out
    assert f"check.json: {tmp_path / 'out' / 'check.json'}" in out
    assert {path.name for path in tmp_path.iterdir()} == {"set", "out"}
    pixels = sum(entry["pixels"]["train"] for entry in report["classes"]) + report["ignored_pixels"]["train"]
    assert pixels == 2 * SIZE[0] * SIZE[1]


def damage_bytes(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


def deep(made):
    """Write the mask with values of 32 bits, in a TIFF where the format has TIFFs."""
    if made.mask.suffix == ".tif":
        layouts.geotiff(made.mask, np.zeros(SIZE, np.float32))
    else:
        # A PNG, whatever the name says: decoders go by the content.
        pixels = np.random.default_rng(0).integers(0, 60000, (*SIZE, 3), np.uint16)
        made.image.write_bytes(cv2.imencode(".png", pixels)[1].tobytes())


def other_size(made):
    shape = (*SIZE[:1], SIZE[1] - 1, *made.raw.shape[2:])
    made.write(made.mask, np.ascontiguousarray(made.raw[:, :-1]).reshape(shape))


# Each fault: what does it, whether training would fail of it, its kind, and how its message begins; {image}
# and {mask} are the first training pair, {val} the image of validation.
FAULTS = {
    "missing mask": (
        lambda m: m.mask.unlink(),
        True,
        "missing mask",
        "The image {image} has no mask; add {mask}, or remove the image.",
    ),
    "extra mask": (
        lambda m: m.image.unlink(),
        False,
        "extra mask",
        "The mask {mask} has no image; add the image, or remove the mask.",
    ),
    "size": (
        other_size,
        True,
        "size",
        "The mask {mask} is 31x24 but its image {image} is 32x24 (width x height); make "
        "them equal (resize the mask by nearest).",
    ),
    "cut short": (
        lambda m: m.mask.write_bytes(m.mask.read_bytes()[:60]),
        True,
        "unreadable",
        "{mask} cannot be ",
    ),
    "not an image": (lambda m: m.image.write_text("oops"), True, "unreadable", "{image} cannot be "),
    "empty": (
        lambda m: m.image.write_bytes(b""),
        True,
        "empty",
        "{image} is empty (0 bytes); restore or remove the file.",
    ),
    "label": (lambda m: m.write(m.mask, m.stray), True, "label", "The mask {mask} holds the "),
    "all ignored": (
        None,
        False,
        "all ignored",
        "The mask {mask} is ignored everywhere; nothing is learned from it",
    ),
    "duplicate": (
        lambda m: shutil.copy(m.image, m.val_image),
        False,
        "duplicate",
        "{val} of val is the same file as {image} of train; remove one of the two",
    ),
    "bit depth": (deep, True, "bit depth", ""),
}
IGNORED = {"cityscapes": 0, "ade20k": 0, "mapillary": 4, "loveda": 0}


@pytest.mark.parametrize("name", NAMES)
def test_each_fault_in_each_format_is_named(tmp_path, name, capsys):
    """Every fault alone in a fresh set: its kind, its message, and the exit status."""
    for case, (damage, fatal, kind, message) in FAULTS.items():
        root = tmp_path / case.replace(" ", "_")
        made = LAYOUTS[name](root)
        if case == "extra mask" and name == "voc":
            continue  # masks that no list names are left out
        if case == "all ignored":
            if name == "uavid":
                continue  # every colour is a class
            layouts_mask = np.full(SIZE, IGNORED.get(name, 255), np.uint8)
            made.write(made.mask, layouts_mask)
        else:
            damage(made)
        status, report = check(tmp_path, name, root)
        printed = capsys.readouterr()
        expected = message.format(image=made.image, mask=made.mask, val=made.val_image)
        hits = [f for f in report["faults"] if f["kind"] == kind and f["message"].startswith(expected)]
        assert hits, (case, report["faults"])
        assert hits[0]["fatal"] is fatal
        assert hits[0]["message"] in printed.out
        assert status == (2 if fatal else 0), (case, report["faults"])
        assert ("seg4k: error: training would fail" in printed.err) is fatal
        assert "Traceback" not in printed.err
        assert report["passed"] is not fatal
        # Training itself agrees.
        assert fails(name, root) is fatal, case


def fails(name, root):
    from seg4k.data.build import build_datamodule
    from seg4k.errors import UserError

    try:
        data = build_datamodule(
            {"name": name, "root": str(root), "image_size": [16, 16]}, seed=0, batch_size=1
        )
        data.setup()
        for dataset in (data.tile_dataset("train"), data.val_dataset()):
            for index in range(len(dataset)):
                dataset[index]
    except UserError:
        return True
    return False


def test_a_png_with_a_wrong_checksum_is_found(tmp_path):
    made = LAYOUTS["folder"](tmp_path / "set")
    damage_bytes(made.image)
    status, report = check(tmp_path, "folder", made.root)
    (fault,) = report["faults"]
    assert status == 2
    assert fault["kind"] == "unreadable"
    assert str(made.image) in fault["message"]


def test_channels_and_bits_are_held_against_the_first_image(tmp_path):
    made = LAYOUTS["folder"](tmp_path / "set")
    layouts.picture(made.root / "images/train/b.png", 1, channels=1)
    layouts.picture(made.val_image, 1, bits=16)
    _, report = check(tmp_path, "folder", made.root)
    assert [fault["kind"] for fault in report["faults"]] == ["channels", "bit depth"]
    assert report["faults"][0]["message"].endswith(
        "b.png has 1 channels where 3 are expected; convert it, or set data.in_channels=3, which takes grey "
        "images too."
    )
    assert report["faults"][1]["message"].endswith(
        "c.png has 16 bits per channel where the first image has 8; convert one of them."
    )


def test_grey_images_count_in_each_of_three_channels(tmp_path):
    made = LAYOUTS["folder"](tmp_path / "set")
    layouts.picture(made.root / "images/train/a.png", 0, channels=1)
    status, report = check(tmp_path, "folder", made.root, "data.in_channels=3")
    assert (status, report["faults"], report["channels"]) == (0, [], 3)
    pixels = np.concatenate(
        [cv2.imread(str(made.root / f"images/train/{n}.png"))[:, :, ::-1].reshape(-1, 3) for n in "ab"]
    )
    np.testing.assert_allclose(report["mean"], pixels.mean(0) / 255, rtol=1e-9)
    layouts.picture(made.val_image, 1, channels=1, bits=16)
    status, report = check(tmp_path, "folder", made.root, "data.in_channels=3")
    assert (status, [fault["kind"] for fault in report["faults"]]) == (2, ["channels"])


def test_figures_are_those_of_the_pixels(tmp_path):
    made = LAYOUTS["folder"](tmp_path / "set")
    layouts.picture(made.root / "images/train/b.png", 5, size=(10, 12))
    labels = np.zeros((10, 12), np.uint8)
    labels[0], labels[1] = 2, 255
    layouts.grey(made.other, labels)
    _, report = check(tmp_path, "folder", made.root)
    pixels = np.concatenate(
        [cv2.imread(str(made.root / f"images/train/{n}.png"))[:, :, ::-1].reshape(-1, 3) for n in "ab"]
    )
    np.testing.assert_allclose(report["mean"], pixels.mean(0) / 255, rtol=1e-9)
    np.testing.assert_allclose(report["std"], pixels.std(0) / 255, rtol=1e-9)
    both = np.concatenate([made.raw.ravel(), labels.ravel()])
    for entry in report["classes"]:
        assert entry["pixels"]["train"] == (both == entry["label"]).sum()
    assert report["ignored_pixels"]["train"] == (both == 255).sum()
    assert report["sizes"] == [
        {"height": 24, "width": 32, "images": 2},
        {"height": 10, "width": 12, "images": 1},
    ]
    # Median frequency balancing by hand; class 1 is in the first image alone.
    valid = [(made.raw < 3).sum(), (labels < 3).sum()]
    frequencies = [
        (both == 0).sum() / sum(valid),
        (made.raw == 1).sum() / valid[0],
        (both == 2).sum() / sum(valid),
    ]
    weights = np.median(frequencies) / frequencies
    np.testing.assert_allclose([entry["suggested_weight"] for entry in report["classes"]], weights)


def test_notes_beside_the_folders_are_no_split(tmp_path):
    made = LAYOUTS["folder"](tmp_path / "set")
    (made.root / "README.txt").write_text("These are our images\n")
    status, report = check(tmp_path, "folder", made.root)
    assert (status, report["faults"]) == (0, [])


def test_what_settings_ask_of_the_data(tmp_path):
    made = LAYOUTS["folder"](tmp_path / "set")
    (made.root / "classes.json").write_text(json.dumps({"classes": ["low", "high", "top", "never"]}))
    rare = ("data.rare_crop_share=0.5", "data.rare_classes=[never]")
    status, report = check(tmp_path, "folder", made.root, *rare)
    assert status == 2
    assert "'never' is in no training mask" in report["faults"][0]["message"]
    assert report["classes"][3]["suggested_weight"] is None
    for name in ("a", "b"):
        layouts.picture(made.root / f"images/train/{name}.png", 0, channels=1)
    layouts.picture(made.val_image, 3, channels=1)
    status, report = check(tmp_path, "folder", made.root, "data.augment.colour=0.5")
    assert status == 2
    assert "set data.augment.colour=0" in report["faults"][-1]["message"]


def test_a_split_that_is_missing(tmp_path):
    made = LAYOUTS["folder"](tmp_path / "set")
    shutil.rmtree(made.root / "images/val")
    status, report = check(tmp_path, "folder", made.root)
    assert status == 2
    assert [fault["kind"] for fault in report["faults"]] == ["layout"]
    assert "images/val does not exist" in report["faults"][0]["message"]
    status, report = check(tmp_path, "folder", made.root, "splits=[train]")
    assert status == 0


@pytest.mark.parametrize("name", NAMES)
def test_splits_that_are_asked_for_must_be_there(tmp_path, name, capsys):
    made = LAYOUTS[name](tmp_path / "set")
    assert check(tmp_path, name, made.root, "splits=train")[1]["images"] == {"train": 2}
    assert check(tmp_path, name, made.root, "splits=[val,val]")[1]["images"] == {"val": 1}
    status, report = check(tmp_path, name, made.root, "splits=[train,trian]")
    assert status == 2
    assert [(fault["kind"], fault["split"]) for fault in report["faults"]] == [("layout", "trian")]
    assert "seg4k: error: training would fail: 1 fault(s), the first:" in capsys.readouterr().err


def test_a_split_that_is_asked_for_must_hold_an_image(tmp_path):
    made = layouts.listed(tmp_path / "set")
    (made.root / "more.txt").write_text("zz\n")
    status, report = check(tmp_path, "folder", made.root, "splits=more")
    assert status == 2
    assert "more.txt, line 1: there is no image zz" in report["faults"][0]["message"]
    (made.root / "more.txt").write_text("zz\nb\n")
    assert check(tmp_path, "folder", made.root, "splits=more")[0] == 0


def test_blue_marble_is_clean(marble, tmp_path):
    status, report = check(tmp_path, "blue_marble", marble)
    assert status == 0
    assert report["images"] == {"train": 30, "val": 15}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data=folder"], "data=folder needs a folder: set data.root=FOLDER"),
        (["data=folder", "data.root=/nowhere"], "The data folder /nowhere does not exist"),
        (["threads=0", "data.root=."], "threads=0: give a whole number from 1 up"),
        (
            ["splits=[]", "data.root=."],
            "splits=[]: give a list of splits, such as [train,val], or null for all",
        ),
        (["splits=[1]", "data.root=."], "splits=[1]: give a list of splits"),
        (["output=2024", "data.root=."], "output is 2024; give a path, one that looks like a number with ./"),
        (["output=null", "data.root=."], "output is None; give a path."),
        (
            ["data.root=2024"],
            "data.root is 2024; give a path, one that looks like a number with ./ before it",
        ),
        (
            ["data=geotiff", "data.root=.", "data.cache=disk"],
            "data.cache=disk has no effect with data=geotiff",
        ),
        (["data.image_sise=3"], "data.image_sise: no such key. Did you mean data.image_size"),
        (["data=citiscapes"], "cityscapes"),
    ],
)
def test_mistakes_end_with_one_message(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(["check-data", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_what_training_skips_is_named_and_not_fatal(tmp_path):
    made = LAYOUTS["folder"](tmp_path / "set")
    made.mask.write_bytes(made.mask.read_bytes()[:60])
    status, report = check(tmp_path, "folder", made.root, "data.on_error=skip")
    assert status == 0
    assert [(fault["kind"], fault["fatal"]) for fault in report["faults"]] == [("unreadable", False)]


def test_a_split_of_which_nothing_is_left_is_fatal(tmp_path):
    made = LAYOUTS["folder"](tmp_path / "set")
    for mask in made.mask.parent.iterdir():
        mask.write_bytes(mask.read_bytes()[:60])
    status, report = check(tmp_path, "folder", made.root, "data.on_error=skip")
    assert status == 2
    fatal = [fault["message"] for fault in report["faults"] if fault["fatal"]]
    assert fatal == ["data.on_error=skip leaves out every pair of train; mend or replace the files."]
