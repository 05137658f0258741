"""The process that traces: it reads requests from one pipe and answers on another until the first is closed.

Started by `seg4k.memory.tracer`, as `python -m seg4k.memory.trace_worker READ WRITE` with two file
descriptors.
"""

import os
import pickle
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any


def main() -> None:
    """Serve requests: first how to build the step, then plans to trace."""
    import torch

    from seg4k.errors import UserError
    from seg4k.memory.trace import trace

    torch.set_num_threads(1)
    requests = Connection(int(sys.argv[1]), writable=False)
    answers = Connection(int(sys.argv[2]), readable=False)
    step: Any = None
    while True:
        try:
            raw = requests.recv_bytes()
        except EOFError:
            return
        try:
            what, arguments = pickle.loads(raw)
            if what == "build":
                build, args = arguments
                step = build(*args)
                answer: tuple[str, Any] = ("ok", list(step.model.segments()))
            else:
                plan, options = arguments
                answer = ("ok", trace(step, plan, **options))
        except UserError as error:
            answer = ("user", str(error))
        except Exception:  # whatever it is, the parent shall tell of it
            answer = ("error", traceback.format_exc())
        answers.send_bytes(pickle.dumps(answer))


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # tracing needs no GPU, and shall not take memory on one
    main()
