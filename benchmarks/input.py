"""Times what training reads, 3840x2160 JPEG + PNG pairs, against a bare decode with the same library.

python benchmarks/input.py [--pairs 12] [--rounds 5] [--root FOLDER] [--output FILE]

One process and one thread; multiply by the workers. Each arm reads every pair once a round.
"""

import argparse
import datetime
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path

import cv2
import numpy as np

from seg4k.data.build import build_datamodule

HEIGHT, WIDTH, CLASSES = 2160, 3840, 19
JITTER = {"brightness": 0.2, "contrast": 0.2, "saturation": 0.2, "hue": 0.02}
AUGMENT = {"hflip": 0.5}  # the default of conf/data/base.yaml
LEAST = 0.6


def write_pairs(root, count):
    """Pictures as detailed as photographs (smooth, edges and grain), and masks of regions with a border."""
    generator = np.random.default_rng(0)
    for split, number in (("train", count), ("val", 1)):
        (root / "images" / split).mkdir(parents=True)
        (root / "masks" / split).mkdir(parents=True)
        for index in range(number):
            seeds = generator.integers(0, CLASSES, (18, 32), dtype=np.uint8)
            labels = cv2.resize(seeds, (WIDTH, HEIGHT), interpolation=cv2.INTER_NEAREST)
            jagged = generator.integers(-20, 20, (2, HEIGHT // 8, WIDTH // 8)).astype(np.float32)
            moves = [cv2.resize(cv2.GaussianBlur(m, (0, 0), 3) * 6, (WIDTH, HEIGHT)) for m in jagged]
            rows, columns = np.mgrid[:HEIGHT, :WIDTH].astype(np.float32)
            labels = cv2.remap(labels, columns + moves[0], rows + moves[1], cv2.INTER_NEAREST)
            colours = generator.integers(30, 220, (CLASSES, 3), dtype=np.uint8)
            image = cv2.GaussianBlur(colours[labels], (0, 0), 1.5).astype(np.int16)
            image += generator.normal(0, 6, image.shape).astype(np.int16)
            edges = cv2.morphologyEx(labels, cv2.MORPH_GRADIENT, np.ones((3, 3), np.uint8)) > 0
            labels[edges] = 255
            name = f"{index:03d}"
            picture = np.clip(image, 0, 255).astype(np.uint8)
            quality = [cv2.IMWRITE_JPEG_QUALITY, 92]
            assert cv2.imwrite(str(root / "images" / split / f"{name}.jpg"), picture, quality)
            assert cv2.imwrite(str(root / "masks" / split / f"{name}.png"), labels)
    (root / "classes.json").write_text(json.dumps({"classes": [f"class {i}" for i in range(CLASSES)]}))


def loader_arm(root, size, augment, **more):
    """A round reads each pair once, through the loader that training reads from."""
    config = {"name": "folder", "root": str(root), "image_size": size, "augment": augment, **more}
    data = build_datamodule(config, seed=0, batch_size=1)
    data.setup("fit")
    loader = data.train_dataloader()
    return lambda: [batch["mask"].shape for batch in loader]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--root", type=Path, help="keep the pairs here for the next time")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    cv2.setNumThreads(0)
    with tempfile.TemporaryDirectory() as scratch:
        root = arguments.root or Path(scratch) / "set"
        if not root.is_dir():
            write_pairs(root, arguments.pairs)
        images = sorted((root / "images" / "train").iterdir())
        masks = sorted((root / "masks" / "train").iterdir())

        def bare():
            for image, mask in zip(images, masks, strict=True):
                cv2.imread(str(image), cv2.IMREAD_COLOR)
                cv2.imread(str(mask), cv2.IMREAD_UNCHANGED)

        whole, crop = [HEIGHT, WIDTH], [1024, 1024]
        cache = {"cache": "disk", "cache_dir": str(Path(scratch) / "cache"), "cache_bytes": 2**36}
        arms = {
            "bare decode": bare,
            "whole": loader_arm(root, whole, AUGMENT),
            "1024 crops": loader_arm(root, crop, AUGMENT),
            "whole, colour jitter": loader_arm(root, whole, {**AUGMENT, "colour": 0.5, **JITTER}),
            "1024 crops, colour jitter": loader_arm(root, crop, {**AUGMENT, "colour": 0.5, **JITTER}),
            "1024 crops, cache": loader_arm(root, crop, AUGMENT, **cache),
        }
        seconds = {name: [] for name in arms}
        for round_ in range(arguments.rounds + 1):
            for name, arm in arms.items():
                start = time.perf_counter()
                arm()
                if round_:  # the first round warms up, and fills the cache
                    seconds[name].append((time.perf_counter() - start) / len(images))
    ratios = {
        name: statistics.median(b / s for b, s in zip(seconds["bare decode"], seconds[name], strict=True))
        for name in arms
    }
    result = {
        "what": "3840x2160 JPEG + PNG pairs, one process, one thread, batch 1; ratio to the bare decode",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": {"architecture": platform.machine(), "processor": platform.processor()},
        "versions": {"python": platform.python_version(), "opencv": cv2.__version__, "numpy": np.__version__},
        "pairs": len(images),
        "rounds": arguments.rounds,
        "augment": AUGMENT,
        "samples_per_second": {n: round(1 / statistics.median(s), 2) for n, s in seconds.items()},
        "ratio_to_bare_decode": {name: round(ratio, 3) for name, ratio in ratios.items()},
        "least_asked": LEAST,
    }
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
