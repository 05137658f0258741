"""Tracing in a process of its own."""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from seg4k.activation_checkpointing.plan import Plan
from seg4k.errors import UserError
from seg4k.memory.step import Step
from seg4k.memory.traced import Trace

__all__ = ["Tracer"]


class Tracer:
    """Traces a step under many plans; used as a context.

    CUDA's rules change what PyTorch's operators do, for every thread of a process. So the step is built and
    traced in another one, which takes no GPU. Traces are kept: asking again for a plan costs nothing.

    Args:
        build: an importable function that makes the `Step`. Called in the other process, so nothing of the
            model is sent. It may build the model on the "meta" device, which takes neither time nor memory.
        args: its arguments.
        rules: "cuda" or "cpu".

    Raises:
        UserError: as `build` raises it.
        RuntimeError: where building or tracing fails otherwise; it holds the other process's traceback.
    """

    def __init__(self, build: Callable[..., Step], *args: object, rules: str = "cuda") -> None:
        self.rules = rules
        self._traces: dict[tuple[Plan, bool], Trace] = {}
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.curdir for path in sys.path)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "seg4k.memory.trace_worker", str(theirs_in), str(theirs_out)],
            pass_fds=(theirs_in, theirs_out),
            env=environment,
            stdin=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._requests = Connection(ours_out, readable=False)
        self._answers = Connection(ours_in, writable=False)
        try:
            self.segment_names: list[str] = self._ask("build", (build, args))
        except BaseException:
            self.close()
            raise

    def trace(self, plan: Plan, *, with_held: bool = False) -> Trace:
        """Trace the step under a plan; see `seg4k.memory.trace.trace`."""
        key = (plan, with_held)
        if key not in self._traces:
            options = {"rules": self.rules, "with_held": with_held}
            self._traces[key] = self._ask("trace", (plan, options))
        return self._traces[key]

    @property
    def plans(self) -> list[Plan]:
        """The plans traced so far."""
        return [plan for plan, with_held in self._traces if not with_held]

    def close(self) -> None:
        """End the other process."""
        self._requests.close()
        self._answers.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> "Tracer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, what: str, arguments: object) -> Any:  # noqa: ANN401
        self._requests.send_bytes(pickle.dumps((what, arguments)))
        try:
            status, value = pickle.loads(self._answers.recv_bytes())
        except EOFError:
            raise RuntimeError(f"the tracing process ended with status {self._process.wait()}") from None
        if status == "user":
            raise UserError(value)
        if status == "error":
            raise RuntimeError(f"tracing the step failed in its own process:\n{value}")
        return value
