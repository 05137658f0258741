"""A reader that kills its process; workers import it by its name."""

import os
import signal

from seg4k.data.scenes import PairReader


class FatalReader(PairReader):
    """Ends with the process where it reads the image `train2.png`."""

    def read(self, image_path, mask_path):
        if image_path.name == "train2.png":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().read(image_path, mask_path)
