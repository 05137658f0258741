"""The command line: `seg4k VERB [Hydra overrides]`. Only Hydra is imported at the start."""

import base64
import difflib
import importlib
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from seg4k.config_keys import check_keys, explain, root_of
from seg4k.errors import PlanDoesNotFit, UserError

USAGE = """seg4k VERB [overrides]

  train       train a segmenter: seg4k train experiment=quickstart
              (--help lists groups and keys; -m sweeps: seed=0,1,2)
  plan        what a run will cost, and the plan that fits: seg4k plan experiment=vitb_4k device=rtx4090
              (strategy=fsdp devices=8 for one of several)
  report      judge the runs below a directory: seg4k report outputs/granularity/sweep_...
  evaluate    score a checkpoint: seg4k evaluate checkpoint=FILE data=folder data.root=FOLDER
  predict     write masks and overlays: seg4k predict checkpoint=FILE input=FOLDER output=FOLDER
  export      write ONNX and torch.export files: seg4k export checkpoint=FILE output=FOLDER
  check-data  read a data set once, name what is wrong: seg4k check-data data=folder data.root=FOLDER

Every override is KEY=VALUE of the configuration in conf/, or GROUP=NAME of one of its groups.
Exit status: 0 success, 2 a mistake in the command or the data, 3 a plan that does not fit,
130 and 143 ended by Ctrl-C and SIGTERM, anything else a fault of seg4k.
"""

DOES_NOT_FIT = 3
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
    except PlanDoesNotFit as error:
        print(f"seg4k: {error}", file=sys.stderr)
        return DOES_NOT_FIT
    except UserError as error:
        return _mistake(str(error))
    except (HydraException, OmegaConfBaseException) as error:
        return _mistake(explain(error, conf_directory(), verb))
    except KeyboardInterrupt:
        print("seg4k: interrupted", file=sys.stderr)
        return INTERRUPTED


def _mistake(message: str) -> int:
    print(f"seg4k: error: {message}", file=sys.stderr)
    return 2


def _command(verb: str, overrides: Sequence[str]) -> str:
    program = Path(sys.argv[0]).name
    words = ["python", program] if program == "train.py" else ["seg4k", verb]
    return " ".join(_quoted(word) for word in (*words, *overrides))


def _quoted(word: str) -> str:
    """The word for a shell, in double quotes where Hydra has quoted a value by single ones."""
    return f'"{word}"' if "'" in word and not set(word) & set('"$`\\!') else shlex.quote(word)


def _train(overrides: Sequence[str]) -> int:
    command = _command("train", overrides)
    overrides = _spelled_out(overrides)
    if {"-m", "--multirun"} & set(overrides):
        return _sweep(overrides)

    def task(config: Mapping[str, Any], directory: Path) -> None:
        if config["speed"]["modes"]:
            from seg4k.studies.step_times import time_modes

            time_modes(config, directory, command)
        else:
            from seg4k.training.train import train

            train(config, directory, command)

    return run_with_config(task, overrides)


def _plan(overrides: Sequence[str]) -> int:
    """Say what a run will cost; the same question is answered at once the second time."""

    def task(config: Mapping[str, Any], directory: Path) -> None:
        from seg4k.files import atomic_path, write_json
        from seg4k.memory.cache import cache_directory, cached, question

        def answer() -> dict[str, Any]:
            from seg4k.training.plan_answer import answer

            return answer(config)

        said = cached(cache_directory(), question(config), answer)
        if said["report"]:
            write_json(directory / "plan.json", said["report"])
        if said["message"]:
            raise PlanDoesNotFit(said["message"], said["report"])
        print(said["text"])
        with atomic_path(directory / "memory.png") as picture:
            picture.write_bytes(base64.b64decode(said["picture"]))
        print(f"plan.json and memory.png: {directory}")

    return run_with_config(task, _spelled_out(overrides))


def _spelled_out(overrides: Sequence[str]) -> list[str]:
    """Overrides with `devices=8`, which goes with `device=` and `strategy=`, as the key that it means."""
    return [f"trainer.{word}" if word.startswith("devices=") else word for word in overrides]


def _sweep(overrides: Sequence[str]) -> int:
    """Run each point of a sweep in a process of its own, so that no peak and no random state leaks.

    A point that fails is a row of the report, and the sweep goes on.
    """
    statuses: list[int] = []

    def task(config: Mapping[str, Any], directory: Path) -> None:
        from hydra.core.hydra_config import HydraConfig

        from seg4k.studies.resume import missing_points

        point = list(HydraConfig.get().overrides.task)
        name = " ".join(point)
        # A point that did not fit would not fit the second time.
        if config["sweep"]["resume"] and not missing_points(
            directory, [point], statuses=("completed", "out_of_memory")
        ):
            print(f"sweep: {name}: done before", flush=True)
            return
        print(f"sweep: {name}", flush=True)
        quoted = str(directory).replace("'", "\\'")
        # A point that was begun goes on from its newest checkpoint; one that never was starts at step 0.
        named = any(word.startswith("resume=") for word in point)
        resume = ["resume=auto"] if config["sweep"]["resume"] and not named else []
        command = [sys.executable, "-m", "seg4k", "train", *point, *resume, f"hydra.run.dir='{quoted}'"]
        result = subprocess.run(command, check=False)
        statuses.append(result.returncode)
        if result.returncode:
            print(f"sweep: {name}: exit status {result.returncode}; going on", file=sys.stderr, flush=True)

    named = [override for override in overrides if override.startswith("hydra.sweep.subdir=")]
    subdirectory = [] if named else [_sweep_subdirectory(overrides)]
    run_with_config(task, [*overrides, *subdirectory])
    return max(statuses, default=0) if all(statuses) else 0


def _sweep_subdirectory(overrides: Sequence[str]) -> str:
    """A readable name for each point, such as stage/seed=0: the mode first, then all else that is swept."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    words = [word for word in overrides if "=" in word and not word.startswith("-")]
    swept = [
        override.key_or_group
        for override in OverridesParser.create().parse_overrides(words)
        if override.is_sweep_override()
    ]
    conf = conf_directory()
    parts = []
    for key in sorted(swept, key=lambda key: key != "activation_checkpointing"):
        if (conf / key).is_dir():
            choice = f"${{hydra:runtime.choices.{key}}}"
            parts.append(choice if key == "activation_checkpointing" else f"{key}={choice}")
        else:
            parts.append(f"{key}=${{{key}}}")
    return f"hydra.sweep.subdir='{'/'.join(parts) or '${hydra:job.num}'}'"


def _verb(name: str, module: str) -> Callable[[Sequence[str]], int]:
    """The verb whose configuration is conf/`name`.yaml and whose work is `run` of a module."""

    def verb(overrides: Sequence[str]) -> int:
        statuses: list[int] = []

        def task(config: Mapping[str, Any], _: Path) -> None:
            statuses.append(importlib.import_module(module).run(config))

        run_with_config(task, overrides, root_of(conf_directory(), name))
        return max(statuses, default=0)

    return verb


def _report(arguments: Sequence[str]) -> int:
    """Write the report of the runs below a directory."""
    directories = [word for word in arguments if not word.startswith("-") and "=" not in word]
    options = dict(word.split("=", 1) for word in arguments if "=" in word)
    unknown = set(options) - {"margin", "baseline"}
    if len(directories) != 1 or unknown or len(directories) + len(options) != len(arguments):
        raise UserError("use: seg4k report DIRECTORY [margin=0.0001] [baseline=none]")
    try:
        margin = float(options.get("margin", 1e-4))
    except ValueError as error:
        raise UserError(f"margin={options['margin']}: give a number, such as 0.0001") from error
    _write_report(Path(directories[0]), margin=margin, baseline=options.get("baseline", "none"))
    return 0


def _write_report(directory: Path, *, margin: float, baseline: str) -> None:
    from seg4k.studies.report import write_report

    write_report(directory, baseline_mode=baseline, margin=margin)
    print((directory / "report.md").read_text(encoding="utf-8"))
    print(f"report.json, report.md, report.html and pareto.png: {directory}", flush=True)


class SweepReport:
    """Hydra callback: writes the report when a sweep ends (conf/config.yaml, hydra.callbacks)."""

    def on_multirun_end(self, config: Any, **_: Any) -> None:  # noqa: ANN401 - Hydra's DictConfig
        """Judge the runs of the sweep; Hydra calls it once, after the last of them."""
        directory, sweep = Path(config.hydra.sweep.dir), config.sweep
        if any(directory.rglob("run_card.json")):
            _write_report(directory, margin=sweep.margin, baseline=sweep.baseline)

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Hydra calls every other event too; none of them matters here."""
        if name.startswith("on_"):
            return lambda *_, **__: None
        raise AttributeError(name)


def run_with_config(
    task: Callable[[Mapping[str, Any], Path], None], overrides: Sequence[str], root: str = "config"
) -> int:
    """Compose conf/`root`.yaml by Hydra and hand it to `task` as plain values, with the run directory."""
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import DictConfig, OmegaConf

    conf = conf_directory()
    failures: list[Exception] = []

    @hydra.main(version_base="1.3", config_path=str(conf), config_name=root)
    def entry(composed: DictConfig) -> None:
        # Hydra would announce an exception in its own words first.
        try:
            check_keys(composed, dict(HydraConfig.get().runtime.choices), conf, root)
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


VERBS: dict[str, Callable[[Sequence[str]], int]] = {
    "train": _train,
    "plan": _plan,
    "report": _report,
    "evaluate": _verb("evaluate", "seg4k.inference.evaluate"),
    "predict": _verb("predict", "seg4k.inference.predict"),
    "export": _verb("export", "seg4k.inference.export"),
    "check-data": _verb("check-data", "seg4k.data.check"),
}
