import json
import shutil

import cv2
import numpy as np
import pytest
import torch

from seg4k.cli import main
from seg4k.data.classes import ClassTable
from seg4k.errors import UserError
from seg4k.inference.evaluate import check_classes, data_settings
from seg4k.inference.scores import ImageScore, class_scores, worst
from seg4k.metrics import ConfusionMatrix


def evaluate(checkpoint, output, *overrides):
    status = main(["evaluate", f"checkpoint={checkpoint}", f"output={output}", *overrides])
    assert status == 0
    return json.loads((output / "evaluation.json").read_text())


def test_the_checkpoint_on_its_own_data_scores_as_its_run_card_says(trained, tmp_path, monkeypatch):
    card, checkpoint = trained
    monkeypatch.chdir(tmp_path)
    result = evaluate(checkpoint, tmp_path / "out")
    assert result["miou"] == pytest.approx(card["metrics"]["val_miou"], abs=1e-6)
    by_name = {row["name"]: row["iou"] for row in result["classes"]}
    assert by_name["left"] == pytest.approx(card["metrics"]["val_iou"]["left"], abs=1e-6)
    assert result["images"] == card["metrics"]["val_samples"] == 3
    # Nothing but the output is written: no files of Hydra.
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"evaluation.json", "confusion.png", "worst.png"}
    for name in ("confusion.png", "worst.png"):
        assert min(cv2.imread(str(tmp_path / "out" / name)).shape[:2]) > 200
    matrix = torch.tensor(result["confusion"])
    assert matrix.sum() == 3 * 45 * 72  # three rows of each mask are ignored
    assert result["accuracy"] == pytest.approx(float(matrix.diagonal().sum() / matrix.sum()))


def test_what_is_left_out_is_said(checkpoint, root, tmp_path, capsys):
    other = shutil.copytree(root, tmp_path / "other")
    broken = other / "masks/val/1.png"
    broken.write_bytes(broken.read_bytes()[:60])
    settings = ("data=folder", f"data.root={other}", "data.on_error=skip", "data.num_workers=0", "worst=0")
    result = evaluate(checkpoint, tmp_path / "out", *settings)
    assert np.sum(result["confusion"]) == 2 * 45 * 72
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if "left out" in line] == [
        line for line in lines if line.startswith(f"seg4k: left out, since data.on_error=skip: {broken}")
    ]
    assert any("left out" in line for line in lines)


def test_another_folder_tiles_and_the_worst_image(checkpoint, root, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(root, other)
    shutil.rmtree(other / "images" / "train")
    shutil.rmtree(other / "masks" / "train")
    mask = cv2.imread(str(other / "masks/val/1.png"), cv2.IMREAD_UNCHANGED)
    cv2.imwrite(str(other / "masks/val/1.png"), np.where(mask == 255, mask, 1 - mask))
    folder = ("data=folder", f"data.root={other}", "data.num_workers=2")
    whole = evaluate(checkpoint, tmp_path / "a", *folder, "worst=1")
    assert whole["worst"][0]["name"] == "1"
    assert whole["worst"][0]["accuracy"] < 0.5
    assert whole["data"] == {"name": "folder", "root": str(other), "split": "val"}
    # data.root alone keeps the rest of the checkpoint's data, here with tiles.
    tiled = evaluate(
        checkpoint, tmp_path / "b", f"data.root={other}", "data.val_size=[24,36]", "batch=4", "worst=0"
    )
    assert tiled["images"] == 12
    assert np.sum(tiled["confusion"]) == np.sum(whole["confusion"])
    assert not (tmp_path / "b" / "worst.png").exists()
    train = evaluate(checkpoint, tmp_path / "c", "split=train", "precision=bf16")
    assert train["images"] == 4
    assert train["precision"] == "bf16"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "checkpoint must be set"),
        (["checkpoint=/no/such.ckpt"], "/no/such.ckpt: no such file"),
        (["checkpoint={checkpoint}", "split=test"], "images/test does not exist"),
        (
            ["checkpoint={checkpoint}", "split=[val]"],
            "split=['val']: give the name of one split, such as val",
        ),
        (["checkpoint={checkpoint}", "split=null"], "split=None: give the name of one split"),
        (["checkpoint=2024"], "checkpoint is 2024; give a path"),
        (["checkpoint={checkpoint}", "output=2024"], "output is 2024; give a path"),
        (["checkpoint={checkpoint}", "output=null"], "output is None; give a path"),
        (["checkpoint={checkpoint}", "worst=-1"], "worst=-1: give a whole number from 0 up"),
        (["checkpoint={checkpoint}", "batch=0"], "batch=0: give a whole number from 1 up"),
        (["checkpoint={checkpoint}", "accelerator=tpu"], "accelerator=tpu: choose one of auto, cpu, gpu"),
        (["checkpoint={checkpoint}", "precision=int8"], "precision=int8: choose one of fp32, bf16, fp16"),
        (["checkpont=x"], "checkpont: no such key. Did you mean checkpoint"),
        (["+data.rooot=x"], "data.rooot: no such key"),
    ],
)
def test_mistakes_end_with_one_message(checkpoint, capsys, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    status = main(["evaluate", *(word.format(checkpoint=checkpoint) for word in arguments)])
    error = capsys.readouterr().err
    assert status == 2, error
    assert message in error
    assert "Traceback" not in error


def test_classes_must_be_those_of_the_checkpoint():
    table = ClassTable.from_names(["road", "tree"])
    check_classes(table, ClassTable.from_names(["road", "tree"], ignore_index=1000))
    with pytest.raises(UserError, match=r"class 1 of the data is 'tree', of the checkpoint 'car'"):
        check_classes(table, ClassTable.from_names(["road", "car"]))
    with pytest.raises(UserError, match="the data have 2 classes, the checkpoint 3"):
        check_classes(table, ClassTable.from_names(["road", "tree", "car"]))


def test_data_are_the_checkpoints_unless_given():
    trained = {"name": "folder", "root": "a", "val_size": [8, 8], "rare_crop_share": 0.5, "augment": {}}
    of_checkpoint = data_settings({"name": "checkpoint", "root": None, "val_size": [4, 4]}, trained)
    assert of_checkpoint["root"] == "a"
    assert of_checkpoint["val_size"] == [4, 4]
    assert of_checkpoint["name"] == "folder"
    assert of_checkpoint["rare_crop_share"] == 0.0
    assert data_settings({"name": "folder", "root": "b"}, trained)["root"] == "b"


def test_scores_by_hand():
    counts = ConfusionMatrix(3)
    counts.update(torch.tensor([[[0, 0, 1, 1]]]), torch.tensor([[[0, 1, 1, 255]]]))
    rows = class_scores(counts, ClassTable.from_names(["a", "b", "c"]))
    assert rows[0] == {"name": "a", "iou": 0.5, "precision": 0.5, "recall": 1.0, "pixels": 1}
    assert rows[1] == {"name": "b", "iou": 0.5, "precision": 1.0, "recall": 0.5, "pixels": 2}
    assert rows[2] == {"name": "c", "iou": None, "precision": None, "recall": None, "pixels": 0}
    nan = float("nan")
    scores = [ImageScore("x", 0, 0.5, 1), ImageScore("y", 1, nan, nan), ImageScore("z", 2, 0.25, 1)]
    assert [score.name for score in worst(scores, 5)] == ["z", "x"]
