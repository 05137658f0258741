"""Exceptions for what the user can mend."""

from collections.abc import Mapping
from typing import Any


class UserError(ValueError):
    """A mistake of the user: the message says what is wrong, where, and how to fix it.

    The command line prints the message without a traceback and exits with status 2.
    """


class PlanDoesNotFit(UserError):
    """No plan fits the device; the command line exits with status 3.

    Args:
        message: the smallest budget that would do, and what lowers it.
        report: the content of plan.json for the best that was found; empty where nothing was.
    """

    def __init__(self, message: str, report: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.report = report
