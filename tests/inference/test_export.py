import json

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from seg4k.cli import main
from seg4k.inference import export, verification
from seg4k.inference.segmenter import load_segmenter
from seg4k.training.train import train
from seg4k.training.weights import load_model
from tests.helpers import smoke


@pytest.fixture(scope="module")
def exported(root, tmp_path_factory):
    """A run that was trained with everything recomputed, exported both ways."""
    directory = tmp_path_factory.mktemp("stage")
    config = smoke(root, "activation_checkpointing=stage", "trainer.max_steps=1", "trainer.val_every_steps=1")
    train(config, directory, "")
    checkpoint = directory / "checkpoints" / "last.ckpt"
    output = directory / "exported"
    assert main(["export", f"checkpoint={checkpoint}", f"output={output}"]) == 0
    return checkpoint, output


def test_both_files_are_the_model_at_any_batch_and_size(exported):
    checkpoint, output = exported
    model = load_model(checkpoint).model
    session = onnxruntime.InferenceSession(output / "model.onnx", providers=["CPUExecutionProvider"])
    program = torch.export.load(output / "model.pt2").module()
    for shape in ((1, 3, 32, 48), (3, 3, 80, 64), (2, 3, 160, 304)):
        image = torch.rand(shape)
        with torch.no_grad():
            expected = model(image)
        (got,) = session.run(None, {"image": image.numpy()})
        np.testing.assert_allclose(got, expected.numpy(), atol=1e-4)
        torch.testing.assert_close(program(image), expected, atol=1e-5, rtol=1e-5)
    onnx.checker.check_model(onnx.load(output / "model.onnx"))


def test_files_say_what_they_are(exported):
    _, output = exported
    session = onnxruntime.InferenceSession(output / "model.onnx", providers=["CPUExecutionProvider"])
    about = session.get_modelmeta().custom_metadata_map
    classes = json.loads(about["seg4k.classes"])
    assert [entry["name"] for entry in classes] == ["left", "right", "nowhere"]
    assert json.loads(about["seg4k.normalisation"]) == {"mean": [0.5] * 3, "std": [0.5] * 3, "inside": True}
    assert json.loads(about["seg4k.input"])["size_multiple"] == [16, 16]
    extra = {"seg4k.json": ""}
    torch.export.load(output / "model.pt2", extra_files=extra)
    assert json.loads(extra["seg4k.json"])["classes"] == classes
    report = json.loads((output / "export.json").read_text())
    assert report["passed"] is True
    assert {entry["file"] for entry in report["verified"]} == {"model.onnx", "model.pt2"}
    for entry in report["verified"]:
        assert entry["agreement"] >= 0.999
        assert entry["max_difference"] < 1e-3
        assert entry["shapes"] == [[1, 3, 64, 96], [4, 3, 32, 48]]


def test_no_trace_of_checkpointing(exported):
    _, output = exported
    graph = onnx.load(output / "model.onnx").graph
    program = torch.export.load(output / "model.pt2")
    names = [node.op_type for node in graph.node] + [str(node.target) for node in program.graph.nodes]
    names += list(program.state_dict) + [tensor.name for tensor in graph.initializer]
    assert not [name for name in names if "checkpoint" in name.lower() or "wrapped" in name.lower()]


def test_a_fixed_size_and_one_file(checkpoint, root, tmp_path, capsys):
    file = tmp_path / "made" / "m.pt2"
    arguments = [f"output={file}", "size=[32,64]", f"images={root / 'images' / 'val'}", "count=2"]
    assert main(["export", f"checkpoint={checkpoint}", *arguments]) == 0
    printed = capsys.readouterr()
    assert "size: 32x64" in printed.out
    assert printed.err == ""  # the exporter's own words are hundreds of lines
    assert [path.name for path in file.parent.iterdir()] == ["m.pt2"]
    program = torch.export.load(file).module()
    assert program(torch.rand(5, 3, 32, 64)).shape == (5, 3, 32, 64)
    with pytest.raises(AssertionError, match=r"32|size"):
        program(torch.rand(1, 3, 48, 64))


def test_a_model_of_4k_is_verified_at_sizes_that_fit(checkpoint, monkeypatch):
    segmenter = load_segmenter(checkpoint, "cpu", "fp32")
    segmenter.config["data"]["image_size"] = [2160, 3840]
    shapes = verification.shapes_to_verify(segmenter, None, 4)
    (one, *double), (count, *single) = shapes
    assert (one, count) == (1, 4)
    assert [side % 16 for side in (*single, *double)] == [0] * 4
    assert double == [2 * side for side in single]
    assert single[0] // 16 * (single[1] // 16) <= 1024
    assert single[1] / single[0] == pytest.approx(3840 / 2160, rel=0.05)
    assert verification.shapes_to_verify(segmenter, (2160, 3840), 4) == [(1, 2160, 3840)]
    # That any size goes is asked of the training size too, in no memory and no time.
    peaks, real = [], torch.export.ExportedProgram.module

    def module(self):
        found = real(self)
        return lambda image: peaks.append((type(image).__name__, image.shape[2:])) or found(image)

    monkeypatch.setattr(torch.export.ExportedProgram, "module", module)
    _, dynamic = export._program(segmenter, None)
    assert dynamic
    assert peaks == [("FakeTensor", (2160, 3840))]


def test_a_fixed_size_that_no_memory_holds_in_onnx_is_refused(checkpoint, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(verification, "free_bytes", lambda device: 2**30)
    arguments = [f"checkpoint={checkpoint}", "size=[2160,3840]"]
    monkeypatch.setattr(export, "_trace", lambda *_: (_ for _ in ()).throw(AssertionError("not before")))
    assert main(["export", *arguments, f"output={tmp_path / 'm.onnx'}"]) == 2
    error = capsys.readouterr().err
    assert "ONNX at the fixed size 2160x3840: its attention is" in error
    assert "or output=FILE.pt2" in error
    assert list(tmp_path.iterdir()) == []


def test_labels_that_disagree_fail(checkpoint, tmp_path, monkeypatch, capsys):
    real = verification._compare
    monkeypatch.setattr(verification, "_compare", lambda *a: real(*a[:3], lambda image: -a[3](image)))
    file = tmp_path / "m.pt2"
    assert main(["export", f"checkpoint={checkpoint}", f"output={file}", "size=[32,48]", "count=1"]) == 1
    assert "FAILED: labels must agree on 99.9%" in capsys.readouterr().out


def test_an_encoder_that_bakes_its_size_in_is_fixed_to_it(checkpoint, monkeypatch, capsys):
    segmenter = load_segmenter(checkpoint, "cpu", "fp32")
    real = export._trace

    def bakes(segmenter, size, dims):
        if len(dims) > 1:
            raise RuntimeError("Constraints violated (rows)!")
        return real(segmenter, size, dims)

    monkeypatch.setattr(export, "_trace", bakes)
    program, dynamic = export._program(segmenter, None)
    assert not dynamic
    assert export._size_of(program) == (32, 48)
    assert "fixed to 32x48" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["output=x"], "checkpoint must be set"),
        (["checkpoint={checkpoint}"], "output must be set"),
        (["checkpoint={checkpoint}", "output=m.pth"], "a file that ends in .onnx or .pt2"),
        (["checkpoint={checkpoint}", "output=m.pt2", "size=[30,48]"], "take size=[32, 48]"),
        (["checkpoint={checkpoint}", "output=m.pt2", "size=4"], "size=4: give [height, width]"),
        (["checkpoint={checkpoint}", "output=m.pt2", "count=0"], "count=0: give a whole number"),
        (["checkpoint={checkpoint}", "output=m.pt2", "images=/none"], "/none: no such file or folder"),
    ],
)
def test_mistakes_end_with_one_message(checkpoint, capsys, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    status = main(["export", *(word.format(checkpoint=checkpoint) for word in arguments)])
    error = capsys.readouterr().err
    assert status == 2, error
    assert message in error
    assert list(tmp_path.iterdir()) == []


def test_without_the_packages_the_way_on_is_named(checkpoint, monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    assert main(["export", f"checkpoint={checkpoint}", f"output={tmp_path / 'm.onnx'}"]) == 2
    assert "pip install 'seg4k[export]'" in capsys.readouterr().err
