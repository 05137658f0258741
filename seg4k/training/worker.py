"""A further process of a run on several devices; see `launch`. Its job comes by standard input, as JSON."""

import json
import logging
import os
import signal
import sys
from pathlib import Path

from seg4k.errors import UserError
from seg4k.training.interruption import Terminated
from seg4k.training.launch import end_with_parent


def main() -> int:
    """Run the job and return the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C comes to all; the first process ends this one
    job = json.load(sys.stdin)
    end_with_parent(job["parent"])
    logging.basicConfig(level=logging.WARNING)
    from seg4k.training.train import train

    try:
        train(job["config"], Path(job["directory"]), job["command"], preflight=job["preflight"])
    except UserError as error:
        print(f"seg4k: process {os.environ['LOCAL_RANK']}: error: {error}", file=sys.stderr, flush=True)
        return 2
    except (Terminated, KeyboardInterrupt):
        return 0  # as agreed; the first process says so
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not through the interpreter's end, where a late thread of gloo aborts: see `leave_process_group`.
    os._exit(status)
