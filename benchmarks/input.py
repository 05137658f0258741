"""Times what training reads, 3840x2160 JPEG + PNG pairs, against a bare decode with the same library.

python benchmarks/input.py --out benchmarks/results/input.json      two minutes; part of suite cpu

One process and one thread; multiply by the workers. Each arm reads every pair once a round.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import cv2
import numpy as np

CLASSES = 19
JITTER = {"brightness": 0.2, "contrast": 0.2, "saturation": 0.2, "hue": 0.02}
AUGMENT = {"hflip": 0.5}  # the default of conf/data/base.yaml
LEAST = 0.6  # of the bare decode's samples per second that training should get


def write_pairs(root, count, height, width):
    """Pictures as detailed as photographs (smooth, edges and grain), and masks of regions with a border."""
    generator = np.random.default_rng(0)
    for split, number in (("train", count), ("val", 1)):
        (root / "images" / split).mkdir(parents=True)
        (root / "masks" / split).mkdir(parents=True)
        for index in range(number):
            seeds = generator.integers(0, CLASSES, (18, 32), dtype=np.uint8)
            labels = cv2.resize(seeds, (width, height), interpolation=cv2.INTER_NEAREST)
            jagged = generator.integers(-20, 20, (2, height // 8, width // 8)).astype(np.float32)
            moves = [cv2.resize(cv2.GaussianBlur(m, (0, 0), 3) * 6, (width, height)) for m in jagged]
            rows, columns = np.mgrid[:height, :width].astype(np.float32)
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
    from seg4k.data.build import build_datamodule

    config = {"name": "folder", "root": str(root), "image_size": size, "augment": augment, **more}
    data = build_datamodule(config, seed=0, batch_size=1)
    data.setup("fit")
    loader = data.train_dataloader()
    return lambda: [batch["mask"].shape for batch in loader]


def throughput(root, pairs=12, rounds=5, height=2160, width=3840):
    """Samples per second of each arm, and the median over rounds of its ratio to the bare decode.

    Args:
        root: a directory; the pairs that it holds are taken, and made where there are none.
    """
    threads = cv2.getNumThreads()
    cv2.setNumThreads(0)
    data = root / f"{width}x{height}"
    if not data.is_dir():
        write_pairs(data, pairs, height, width)
    images = sorted((data / "images" / "train").iterdir())
    masks = sorted((data / "masks" / "train").iterdir())

    def bare():
        for image, mask in zip(images, masks, strict=True):
            cv2.imread(str(image), cv2.IMREAD_COLOR)
            cv2.imread(str(mask), cv2.IMREAD_UNCHANGED)

    whole, crop = [height, width], [min(1024, height // 2)] * 2
    cache = {"cache": "disk", "cache_dir": str(root / "cache"), "cache_bytes": 2**36}
    arms = {
        "bare decode": bare,
        "whole": loader_arm(data, whole, AUGMENT),
        f"{crop[0]} crops": loader_arm(data, crop, AUGMENT),
        "whole, colour jitter": loader_arm(data, whole, {**AUGMENT, "colour": 0.5, **JITTER}),
        f"{crop[0]} crops, colour jitter": loader_arm(data, crop, {**AUGMENT, "colour": 0.5, **JITTER}),
        f"{crop[0]} crops, cache on disk": loader_arm(data, crop, AUGMENT, **cache),
    }
    seconds = {name: [] for name in arms}
    for round_ in range(rounds + 1):
        for name, arm in arms.items():
            start = time.perf_counter()
            arm()
            if round_:  # the first round warms up, and fills the cache
                seconds[name].append((time.perf_counter() - start) / len(images))
    cv2.setNumThreads(threads)
    rows = {
        name: {
            "samples_per_second": 1 / statistics.median(taken),
            "ratio": statistics.median(b / s for b, s in zip(seconds["bare decode"], taken, strict=True)),
        }
        for name, taken in seconds.items()
    }
    return {
        "height": height,
        "width": width,
        "pairs": len(images),
        "rounds": rounds,
        "augment": AUGMENT,
        "least_asked": LEAST,
        "opencv": cv2.__version__,
        "rows": rows,
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--root", type=Path, help="keep the pairs here for the next time")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    from provenance import provenance
    from render import input_table

    from seg4k.files import write_json

    with tempfile.TemporaryDirectory() as scratch:
        found = throughput(options.root or Path(scratch), options.pairs, options.rounds)
    print(input_table(found))
    if options.out:
        write_json(options.out, {**provenance({"pairs": options.pairs, "rounds": options.rounds}), **found})


if __name__ == "__main__":
    main()
