"""The command line: `seg4k VERB [Hydra overrides]`. Only Hydra is imported at the start."""

import difflib
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from seg4k.errors import UserError

USAGE = """seg4k VERB [overrides]

  train       train a segmenter: seg4k train experiment=quickstart
              (--help lists groups and keys; -m sweeps: seed=0,1,2)

Every override is KEY=VALUE of the configuration in conf/, or GROUP=NAME of one of its groups.
Exit status: 0 success, 2 a mistake in the command or the data, 3 a plan that does not fit,
anything else a fault of seg4k.
"""

INTERRUPTED = 130


def conf_directory() -> Path:
    """The configuration: inside an installed wheel, or at the top of a clone."""
    package = Path(__file__).parent
    installed, clone = package / "conf", package.parent / "conf"
    found = clone if (clone / "config.yaml").is_file() else installed
    if not (found / "config.yaml").is_file():
        raise UserError(f"no configuration at {clone} or {installed}; install seg4k again")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit status; a user's mistake is one message on stderr, no traceback."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    verb, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if verb in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    if verb not in VERBS:
        near = difflib.get_close_matches(verb, VERBS, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        print(f"seg4k: no verb {verb!r}.{hint}\n\n{USAGE}" if verb else USAGE, end="", file=sys.stderr)
        return 2
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        return VERBS[verb](rest)
    except UserError as error:
        return _mistake(str(error))
    except (HydraException, OmegaConfBaseException) as error:
        return _mistake(_explain(error))
    except KeyboardInterrupt:
        print("seg4k: interrupted", file=sys.stderr)
        return INTERRUPTED


def _mistake(message: str) -> int:
    print(f"seg4k: error: {message}", file=sys.stderr)
    return 2


def _command(verb: str, overrides: Sequence[str]) -> str:
    program = Path(sys.argv[0]).name
    words = ["python", program] if program == "train.py" else ["seg4k", verb]
    return shlex.join([*words, *overrides])


def _train(overrides: Sequence[str]) -> int:
    command = _command("train", overrides)

    def task(config: Mapping[str, Any], directory: Path) -> None:
        from seg4k.training.train import train

        train(config, directory, command)

    return run_with_config(task, overrides)


def run_with_config(task: Callable[[Mapping[str, Any], Path], None], overrides: Sequence[str]) -> int:
    """Compose the configuration by Hydra and hand it to `task` as plain values, with the run directory."""
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import DictConfig, OmegaConf

    conf = conf_directory()
    failures: list[Exception] = []

    @hydra.main(version_base="1.3", config_path=str(conf), config_name="config")
    def entry(composed: DictConfig) -> None:
        # Hydra would announce an exception in its own words first.
        try:
            _check_keys(composed, dict(HydraConfig.get().runtime.choices), conf)
            config = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
            assert isinstance(config, dict)
            directory = Path(HydraConfig.get().runtime.output_dir)
            task({str(key): value for key, value in config.items()}, directory)
        except Exception as error:
            failures.append(error)

    # Hydra would print a mistake as a traceback and exit with 1; so it lets the exception through.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    program = sys.argv[0]
    before, sys.argv = sys.argv, [program, *overrides]
    try:
        entry()
    finally:
        sys.argv = before
    if failures:
        raise failures[0]
    return 0


def _check_keys(composed: Any, choices: Mapping[str, str | None], conf: Path) -> None:  # noqa: ANN401
    """Refuse keys that nothing reads, and words where a number or true/false belongs.

    An experiment file or `+key=value` could bring such keys in unnoticed.
    """
    from omegaconf import OmegaConf

    known = _flat(_reference(choices, conf))
    for key, value in _flat(OmegaConf.to_container(composed, resolve=False)).items():
        if key not in known:
            raise UserError(f"{key}: no such key.{_did_you_mean(key, known)} See {conf} for all of them.")
        default = known[key]
        if isinstance(default, bool) and not isinstance(value, bool):
            raise UserError(f"{key}={value}: give true or false")
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if isinstance(default, int | float) and not isinstance(default, bool) and not number:
            raise UserError(f"{key}={value}: give a number, such as {default}")


def _reference(choices: Mapping[str, str | None], conf: Path) -> dict[str, Any]:
    """Every key that config.yaml and the chosen group files have, without what an experiment overrides."""
    from omegaconf import OmegaConf

    def load(path: Path) -> dict[str, Any]:
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        assert isinstance(content, dict)
        keys = {str(key): value for key, value in content.items()}
        for entry in keys.pop("defaults", []):
            if isinstance(entry, str) and entry != "_self_" and (path.parent / f"{entry}.yaml").is_file():
                keys = {**load(path.parent / f"{entry}.yaml"), **keys}
        return keys

    reference = load(conf / "config.yaml")
    reference.pop("hydra", None)
    for group, choice in choices.items():
        if not group.startswith("hydra/") and group != "experiment" and choice is not None:
            reference[group] = load(conf / group / f"{choice}.yaml")
    return reference


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:  # noqa: ANN401 - any nesting
    """Every key of nested mappings as a dotted name, the inner ones too."""
    found: dict[str, Any] = {}
    if isinstance(value, Mapping):
        for key, entry in value.items():
            found[f"{prefix}{key}"] = entry
            found |= _flat(entry, f"{prefix}{key}.")
    return found


def _did_you_mean(key: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(key, sorted(known), n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(near)}?" if near else ""


def _explain(error: Exception) -> str:
    """Hydra's message without its advice to append, which would only add a key that nothing reads."""
    from omegaconf.errors import MissingMandatoryValue

    if isinstance(error, MissingMandatoryValue):
        return f"{error.full_key}: must be set, {error.full_key}=VALUE"
    message = str(error)
    found = re.match(r"Could not override '(?P<key>[^']+)'", message)
    if found:
        conf = conf_directory()
        known = _flat(_reference(_default_choices(conf), conf))
        key = found["key"]
        if key in known:  # the key is right; what is wrong is the value, and the cause says how
            return f"{key}: {error.__cause__ or message}"
        return f"{key}: no such key.{_did_you_mean(key, known)} See {conf} for all of them."
    if error.__cause__ is not None and str(error.__cause__) not in message:
        message = f"{message} ({error.__cause__})"
    return message.strip()


def _default_choices(conf: Path) -> dict[str, str | None]:
    from omegaconf import OmegaConf

    content = OmegaConf.to_container(OmegaConf.load(conf / "config.yaml"), resolve=False)
    assert isinstance(content, dict)
    choices: dict[str, str | None] = {}
    for entry in content["defaults"]:
        if isinstance(entry, dict):
            choices.update(entry)
    return choices


VERBS: dict[str, Callable[[Sequence[str]], int]] = {"train": _train}
