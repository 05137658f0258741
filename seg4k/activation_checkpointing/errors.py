"""The error of a segment whose recomputation would not be exact."""


class ActivationCheckpointingError(RuntimeError):
    """Recomputing a segment would give other gradients than keeping its activations.

    The message names the segment, what differs and how to mend it. It is a fault of the model's code, not of
    the configuration, so it is no UserError: the traceback is wanted.
    """


def inexact(segment: str, what: str, fix: str) -> ActivationCheckpointingError:
    """The error, in one form of words."""
    return ActivationCheckpointingError(f"segment {segment}: {what}. {fix}")
