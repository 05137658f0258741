"""Keys of the configuration: which there are, and what to say of one that there is not."""

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from seg4k.errors import UserError


def check_keys(
    composed: Any,  # noqa: ANN401 - Hydra's DictConfig
    choices: Mapping[str, str | None],
    conf: Path,
    root: str,
) -> None:
    """Refuse keys that nothing reads, and values of another kind than the default's.

    An experiment file or `+key=value` could bring such keys in unnoticed. A number such as 1e4 becomes the
    whole number that it is, where one belongs.
    """
    from omegaconf import OmegaConf

    known = _flat(_reference(choices, conf, root))
    for key, value in _flat(OmegaConf.to_container(composed, resolve=False)).items():
        if key not in known:
            raise UserError(f"{key}: no such key.{_did_you_mean(key, known)} See {conf} for all of them.")
        default = known[key]
        if isinstance(default, bool) and not isinstance(value, bool):
            raise UserError(f"{key}={value}: give true or false")
        if value is None and key.startswith("data."):
            continue  # has a meaning for some of them, and is refused for the others, in seg4k.data.settings
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if isinstance(default, int | float) and not isinstance(default, bool) and not number:
            raise UserError(f"{key}={value}: give a number, such as {default}")
        if isinstance(default, int) and isinstance(value, float):
            if not value.is_integer():
                raise UserError(f"{key}={value}: give a whole number, such as {default}")
            OmegaConf.update(composed, key, int(value))
        if isinstance(default, list) and value is not None:  # where null is none, what reads the key says so
            pair = len(default) == 2 and all(isinstance(entry, int | float) for entry in default)
            if not isinstance(value, list) or (pair and len(value) != 2):
                example = f", such as {key}={str(default).replace(' ', '')}" if default else ""
                raise UserError(f"{key}={value}: give a list{' of two numbers' if pair else ''}{example}")


def _reference(choices: Mapping[str, str | None], conf: Path, root: str) -> dict[str, Any]:
    """Every key of conf/`root`.yaml and of the chosen group files, without what an experiment overrides."""
    from omegaconf import OmegaConf

    def load(path: Path) -> dict[str, Any]:
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        assert isinstance(content, dict)
        keys = {str(key): value for key, value in content.items()}
        for entry in keys.pop("defaults", []):
            if isinstance(entry, str) and entry != "_self_" and (path.parent / f"{entry}.yaml").is_file():
                keys = {**load(path.parent / f"{entry}.yaml"), **keys}
        return keys

    reference = load(conf / f"{root}.yaml")
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


def explain(error: Exception, conf: Path, verb: str) -> str:
    """Hydra's message without its advice to append, which would only add a key that nothing reads."""
    from hydra.errors import MissingConfigException
    from omegaconf.errors import MissingMandatoryValue

    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, name = error.missing_cfg_file.rpartition("/")
        choices = [option for option in error.options if option != "base"]
        return (
            f"{group}={name}: no such choice.{_did_you_mean(name, choices)} There are {', '.join(choices)}."
        )
    if isinstance(error, MissingMandatoryValue):
        return f"{error.full_key}: must be set, {error.full_key}=VALUE"
    message = str(error)
    found = re.match(r"Could not override '(?P<key>[^']+)'", message)
    if found:
        root = root_of(conf, verb)
        known = _flat(_reference(_default_choices(conf, root), conf, root))
        key = found["key"]
        if key in known:  # the key is right; what is wrong is the value, and the cause says how
            return f"{key}: {error.__cause__ or message}"
        return f"{key}: no such key.{_did_you_mean(key, known)} See {conf} for all of them."
    if error.__cause__ is not None and str(error.__cause__) not in message:
        message = f"{message} ({error.__cause__})"
    return message.strip()


def _default_choices(conf: Path, root: str) -> dict[str, str | None]:
    from omegaconf import OmegaConf

    content = OmegaConf.to_container(OmegaConf.load(conf / f"{root}.yaml"), resolve=False)
    assert isinstance(content, dict)
    choices: dict[str, str | None] = {}
    for entry in content["defaults"]:
        if isinstance(entry, dict):
            choices |= {group: name for group, name in entry.items() if not group.startswith("override ")}
    return choices


def root_of(conf: Path, verb: str) -> str:
    """The file of conf/ that a verb composes, without its suffix."""
    root = verb.replace("-", "_")
    return root if (conf / f"{root}.yaml").is_file() else "config"
