"""What a worker of a loader needs; its server imports this once, so that workers start with it in memory."""

import multiprocessing
import os
import threading
from importlib import import_module

import cv2

# albumentations asks the network for a newer version when it is imported.
os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")
for module in ("albumentations", "seg4k.data.samples", "seg4k.data.raster_scenes"):
    import_module(module)


def start(worker: int) -> None:
    """Begin a worker."""
    # Workers share the cores among themselves; OpenCV would start a thread per core in each of them.
    cv2.setNumThreads(0)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End when the training process is no more, however it ended.

    torch looks at the parent of a worker, which is the server, and the server waits for its workers.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
