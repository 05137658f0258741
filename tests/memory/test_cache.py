import os

import pytest

from seg4k.cli import main
from seg4k.memory import cache
from seg4k.memory.cache import cached, question
from tests.helpers import configuration

TINY = ("experiment=smoke", "device=rtx4090", "plan.num_classes=5", "batch.effective=1")


def test_a_plan_file_is_part_of_the_question_by_its_content(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "plan.json"
    words = ["plan", *TINY, "activation_checkpointing=plan", f"activation_checkpointing.path={file}"]
    file.write_text('{"neck.*": "recompute"}')
    assert main(words) == 0
    capsys.readouterr()
    file.write_text("{garbage")
    assert main(words) == 2
    assert "the plan is not JSON" in capsys.readouterr().err
    file.unlink()
    assert main(words) == 2
    assert str(file) in capsys.readouterr().err


def test_two_plan_files_are_two_questions(tmp_path):
    file = tmp_path / "plan.json"
    config = configuration(*TINY, "activation_checkpointing=plan", f"activation_checkpointing.path={file}")
    asked = []
    for text in (None, '{"neck.*": "recompute"}', '{"neck.*": "keep"}'):
        if text is not None:
            file.write_text(text)
        asked.append(question(config))
    assert all(one != other for index, one in enumerate(asked) for other in asked[:index])


@pytest.mark.parametrize(
    "variable", ["CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "OMP_NUM_THREADS", "MKL_NUM_THREADS"]
)
def test_another_gpu_or_number_of_threads_is_another_question_on_this_machine(monkeypatch, variable):
    here, elsewhere = (configuration(*TINY[::2], f"device={name}") for name in ("this", "rtx4090"))
    before = question(here), question(elsewhere)
    monkeypatch.setenv(variable, "7")
    assert question(here) != before[0]
    assert question(elsewhere) == before[1]


def test_the_gpus_of_this_machine_are_part_of_the_question(tmp_path, monkeypatch):
    here = configuration(*TINY[::2], "device=this")
    monkeypatch.setattr(cache, "_GPUS", tmp_path)
    asked = [question(here)]
    information = tmp_path / "0000:01:00.0" / "information"
    information.parent.mkdir()
    for model in ("NVIDIA L4", "NVIDIA T4"):
        information.write_text(f"Model: \t\t {model}\nIRQ:   \t\t 42\n")
        asked.append(question(here))
        information.write_text(f"Model: \t\t {model}\nIRQ:   \t\t 43\n")  # not what it is, but how it runs
        assert question(here) == asked[-1]
    assert all(one != other for index, one in enumerate(asked) for other in asked[:index])


@pytest.mark.parametrize(("device", "depends"), [("this", True), ("cpu", True), ("rtx4090", False)])
def test_the_memory_of_this_machine_is_part_of_the_question_where_it_counts(monkeypatch, device, depends):
    config = configuration(*TINY[::2], f"device={device}")
    before = question(config)
    real = os.sysconf
    monkeypatch.setattr(os, "sysconf", lambda name: real(name) * (2 if name == "SC_PHYS_PAGES" else 1))
    assert (question(config) != before) is depends


def test_without_a_place_for_the_cache_nothing_is_kept(tmp_path):
    file = tmp_path / "file"
    file.write_text("no directory")
    for _ in range(2):
        assert cached(file / "plans", {"a": 1}, lambda: {"peak": 1}) == {"peak": 1}
    assert file.read_text() == "no directory"


def test_errors_of_the_answer_are_its_own(tmp_path):
    def answer():
        raise FileNotFoundError("of the data")

    with pytest.raises(FileNotFoundError, match="of the data"):
        cached(tmp_path, {"a": 1}, answer)
