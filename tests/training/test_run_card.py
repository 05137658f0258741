import subprocess

import seg4k
from seg4k.training.run_card import code_state


def git(root, *arguments):
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    return subprocess.run(
        ["git", "-C", str(root), *identity, *arguments], check=True, capture_output=True, text=True
    )


def test_results_do_not_make_the_code_dirty(tmp_path, monkeypatch):
    package = tmp_path / "seg4k"
    package.mkdir()
    (package / "__init__.py").write_text("")
    git(tmp_path, "init")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-m", "first")
    monkeypatch.setattr(seg4k, "__file__", str(package / "__init__.py"))
    assert code_state()["git_sha"] == git(tmp_path, "rev-parse", "HEAD").stdout.strip()
    assert code_state()["dirty"] is False
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "benchmarks" / "results" / "suite.json").write_text("{}")
    assert code_state()["dirty"] is False
    (package / "new.py").write_text("")
    assert code_state()["dirty"] is True
