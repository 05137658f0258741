import subprocess
import sys
from pathlib import Path

import pytest

from seg4k.data.build import build_datamodule
from seg4k.data.formats import NAMES
from seg4k.errors import UserError
from tests.helpers import configuration

CONF = Path(__file__).parents[2] / "conf" / "data"


def read(name):
    return configuration(f"data={name}")["data"]


def test_the_config_of_blue_marble_is_whole(marble):
    config = {**read("blue_marble"), "root": str(marble)}
    datamodule = build_datamodule(config, seed=0, batch_size=2)
    datamodule.setup()
    assert datamodule.train_dataset()[0, 0]["image"].shape == (3, 256, 256)
    assert datamodule.val_dataset()[0]["image"].shape == (3, 256, 256)
    assert datamodule.settings.augment.jitters


def test_the_config_of_a_folder_is_whole(make_folder):
    datamodule = build_datamodule({**read("folder"), "root": str(make_folder())}, seed=0, batch_size=2)
    datamodule.setup()
    assert datamodule.train_dataset()[0, 0]["image"].shape == (3, 512, 512)
    assert datamodule.val_dataset()[0]["image"].shape == (3, 40, 56)


@pytest.mark.parametrize("name", ["blue_marble", "base", *NAMES])
def test_every_key_is_explained_where_it_stands(name):
    for line in (CONF / f"{name}.yaml").read_text().splitlines():
        key = line.strip()
        if key and not key.startswith(("#", "-", "name:", "defaults:")):
            assert "  # " in line, line


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "folders"}, "data.name is 'folders'; did you mean folder"),
        ({"name": None}, "data.name is None; it can be: blue_marble, folder"),
        ({"image_sise": [1, 2]}, "Unknown key data.image_sise for data=folder; did you mean image_size"),
        ({"zzz": 1}, "Unknown key data.zzz for data=folder; it can be: name, root"),
        ({"name": "blue_marble", "in_channels": 3}, "Unknown key data.in_channels for data=blue_marble"),
        ({"image_size": None}, "data.image_size is not set"),
        ({"image_size": 512}, "data.image_size is 512; give two whole numbers"),
        ({"image_size": [512, 0]}, r"data.image_size is \[512, 0\]"),
        ({"val_size": [1.5, 2]}, r"data.val_size is \[1.5, 2\]"),
        ({"samples_per_epoch": 0}, "data.samples_per_epoch is 0; give a whole number from 1 up, or null"),
        ({"num_workers": -1}, "data.num_workers is -1; give a whole number from 0 up"),
        ({"num_workers": True}, "data.num_workers is True"),
        ({"rare_crop_share": 1.5}, "data.rare_crop_share is 1.5; give a number from 0 to 1"),
        ({"rare_crop_share": 0.5}, r"data.rare_crop_share needs classes: set data.rare_classes"),
        ({"rare_classes": "top"}, "data.rare_classes is 'top'; give a list"),
        ({"rare_classes": ["topp"]}, "no class 'topp'; did you mean 'top'"),
        ({"in_channels": "three"}, "data.in_channels is 'three'"),
        ({"in_channels": 4}, "train0.png has 3 channels where 4 are expected"),
        ({"augment": {"hflop": 1}}, "Unknown key data.augment.hflop; did you mean 'hflip'"),
        ({"cache": "disc"}, "data.cache is 'disc'; choose none, ram or disk"),
        (
            {"name": "geotiff", "cache": "ram"},
            "data.cache=ram has no effect with data=geotiff: .* set data.cache",
        ),
        ({"cache_bytes": 0}, "data.cache_bytes is 0; give a whole number from 1 up"),
        ({"class_file": "/no/file.json"}, "The class file /no/file.json does not exist"),
        ({"root": None}, "data=folder needs a folder: set data.root=FOLDER"),
        ({"root": "/nowhere"}, "The data folder /nowhere does not exist; set data.root=FOLDER"),
    ],
)
def test_wrong_settings_name_the_key_and_the_fix(make_folder, change, message):
    config = {"name": "folder", "root": str(make_folder()), "image_size": [16, 16], **change}
    with pytest.raises(UserError, match=message):
        build_datamodule(config, seed=0, batch_size=2).setup()


def test_a_folder_without_classes_shows_the_form(make_folder):
    root = make_folder()
    (root / "classes.json").unlink()
    with pytest.raises(UserError, match=r"classes\.json does not exist; write it as"):
        build_datamodule({"name": "folder", "root": root, "image_size": [16, 16]}, seed=0, batch_size=2)


def test_checking_the_config_imports_nothing_heavy():
    code = (
        "import sys, seg4k.data, seg4k.data.build\n"
        "heavy = {'torch', 'lightning', 'numpy', 'cv2', 'albumentations'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
