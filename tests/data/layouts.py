"""Tiny data sets in the layout of each format, written by the encoders that the real ones are written by."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import rasterio
from affine import Affine
from PIL import Image
from rasterio.crs import CRS

TRANSFORM = Affine(0.5, 0, 500_000, 0, -0.5, 5_300_000)
SIZE = (24, 32)


@dataclass
class Layout:
    """A set of two training pairs and one for validation.

    Attributes:
        root: its folder.
        images, masks: of the first training pair.
        raw: the values written into that mask, (H, W), or (H, W, 3) where masks are colours.
        other: the mask of the second training pair.
        val_image: the image of the validation pair.
        wrong: writes a mask with a value that no class has.
    """

    root: Path
    image: Path
    mask: Path
    raw: np.ndarray
    other: Path
    val_image: Path
    write: Callable[[Path, np.ndarray], None]
    stray: np.ndarray


def values(choices, seed=0, size=SIZE, dtype=np.uint8):
    return np.random.default_rng(seed).choice(np.asarray(choices, dtype), size)


def picture(path: Path, seed: int, size=SIZE, bits: int = 8, channels: int = 3) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    dtype = np.uint8 if bits == 8 else np.uint16
    pixels = np.random.default_rng(seed).integers(1, 2**bits, (*size, channels), dtype)
    assert cv2.imwrite(str(path), pixels)


def grey(path: Path, labels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    assert cv2.imwrite(str(path), labels)


def palette(path: Path, labels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(labels)
    image.putpalette(np.random.default_rng(0).integers(0, 256, 768, np.uint8).tobytes())
    image.save(path)


def coloured(path: Path, colours: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(colours).save(path)


def geotiff(path: Path, pixels: np.ndarray, nodata: int | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = pixels[:, :, None] if pixels.ndim == 2 else pixels
    with rasterio.open(
        path,
        "w",
        driver="GTiff",
        height=pixels.shape[0],
        width=pixels.shape[1],
        count=pixels.shape[2],
        dtype=pixels.dtype.name,
        crs=CRS.from_epsg(32632),
        transform=TRANSFORM,
        nodata=nodata,
        tiled=True,
        blockxsize=16,
        blockysize=16,
        compress="deflate",
    ) as file:
        file.write(np.moveaxis(pixels, 2, 0))


def _set(root, pairs, choices, write, stray, *, image=picture, names=None) -> Layout:
    """Write three pairs (image, mask): two of training, one of validation."""
    for seed, (image_path, mask_path) in enumerate(pairs):
        image(root / image_path, seed)
        write(root / mask_path, values(choices, seed))
    raw = values(choices, 0)
    (image0, mask0), (_, mask1), (image2, _) = pairs
    return Layout(root, root / image0, root / mask0, raw, root / mask1, root / image2, write, values(stray))


def folder(root: Path) -> Layout:
    pairs = [
        (f"images/{split}/{n}.png", f"masks/{split}/{n}.png")
        for split, n in (("train", "a"), ("train", "b"), ("val", "c"))
    ]
    made = _set(root, pairs, [0, 1, 2, 255], grey, [0, 7])
    (root / "classes.json").write_text(json.dumps({"classes": ["low", "high", "top"]}))
    return made


def listed(root: Path) -> Layout:
    """A plain folder with lists."""
    pairs = [
        ("images/x/a.jpg", "masks/x/a.png"),
        ("images/b.png", "masks/b.png"),
        ("images/c.png", "masks/c.png"),
    ]
    made = _set(root, pairs, [0, 1, 2, 255], grey, [0, 7])
    (root / "classes.csv").write_text("low,0,0,0\nhigh,255,0,0\ntop,0,255,0\n")
    (root / "train.txt").write_text("x/a.jpg\n\n# a comment\nb\n")
    (root / "val.txt").write_text("c.png\n")
    return made


def scenes_of_geotiff(root: Path) -> Layout:
    pairs = [
        (f"images/{split}/{n}.tif", f"masks/{split}/{n}.tif")
        for split, n in (("train", "a"), ("train", "b"), ("val", "c"))
    ]

    def image(path, seed):
        geotiff(path, np.random.default_rng(seed).integers(1, 60000, (*SIZE, 5), np.uint16), nodata=0)

    made = _set(root, pairs, [0, 1, 2, 255], geotiff, [0, 7], image=image)
    (root / "classes.json").write_text(json.dumps({"classes": ["low", "high", "top"]}))
    return made


def cityscapes(root: Path) -> Layout:
    def pair(split, city, number):
        stem = f"{city}_000000_{number:06d}"
        return (
            f"leftImg8bit/{split}/{city}/{stem}_leftImg8bit.png",
            f"gtFine/{split}/{city}/{stem}_gtFine_labelIds.png",
        )

    pairs = [pair("train", "aachen", 19), pair("train", "bochum", 0), pair("val", "frankfurt", 294)]
    made = _set(root, pairs, list(range(34)), grey, [7, 34])
    for _, mask in pairs:  # what lies beside the label ids in the archive
        coloured(root / mask.replace("labelIds", "color"), np.zeros((*SIZE, 3), np.uint8))
        grey(root / mask.replace("labelIds", "instanceIds"), np.zeros(SIZE, np.uint16))
        (root / mask.replace("labelIds.png", "polygons.json")).write_text("{}")
    return made


def ade20k(root: Path) -> Layout:
    pairs = [
        (f"images/{split}/ADE_{n}.jpg", f"annotations/{split}/ADE_{n}.png")
        for split, n in (("training", "train_1"), ("training", "train_2"), ("validation", "val_1"))
    ]
    made = _set(root, pairs, list(range(151)), grey, [1, 151])
    picture(root / pairs[1][0], 1, channels=1)  # the real set has a few grey images
    return made


def voc(root: Path) -> Layout:
    pairs = [(f"JPEGImages/{n}.jpg", f"SegmentationClass/{n}.png") for n in ("2007_1", "2007_2", "2008_1")]
    made = _set(root, pairs, [*range(21), 255], palette, [0, 21])
    picture(root / "JPEGImages/not_segmented.jpg", 9)
    lists = root / "ImageSets" / "Segmentation"
    lists.mkdir(parents=True)
    (lists / "train.txt").write_text("2007_1\n2007_2\n")
    (lists / "val.txt").write_text("2008_1\n")
    return made


def coco_stuff(root: Path) -> Layout:
    pairs = [
        (f"{split}2017/{n:012d}.jpg", f"stuffthingmaps/{split}2017/{n:012d}.png")
        for split, n in (("train", 9), ("train", 25), ("val", 139))
    ]
    made = _set(root, pairs, [*range(182), 255], grey, [0, 182])
    picture(root / pairs[1][0], 1, channels=1)  # the real set has a few grey images
    return made


MAPILLARY_LABELS = [
    {"name": "animal--bird", "readable": "Bird", "color": [165, 42, 42], "evaluate": True, "instances": True},
    {"name": "construction--flat--road", "readable": "Road", "color": [128, 64, 128], "evaluate": True},
    {"name": "marking--general", "readable": "Marking", "color": [255, 255, 255], "evaluate": True},
    {"name": "marking--other", "readable": "Marking", "color": [250, 250, 250], "evaluate": True},
    {"name": "void--unlabeled", "readable": "Unlabeled", "color": [0, 0, 0], "evaluate": False},
]


def mapillary(root: Path) -> Layout:
    pairs = [
        (f"{split}/images/{n}.jpg", f"{split}/v2.0/labels/{n}.png")
        for split, n in (("training", "aa"), ("training", "bb"), ("validation", "cc"))
    ]
    made = _set(root, pairs, [0, 1, 2, 3, 4], palette, [0, 5])
    (root / "config_v2.0.json").write_text(json.dumps({"version": "2.0", "labels": MAPILLARY_LABELS}))
    return made


UAVID_COLOURS = np.array(
    [
        [128, 0, 0],
        [128, 64, 128],
        [192, 0, 192],
        [0, 128, 0],
        [128, 128, 0],
        [64, 64, 0],
        [64, 0, 128],
        [0, 0, 0],
    ],
    np.uint8,
)


def uavid(root: Path) -> Layout:
    pairs = [
        (f"uavid_{split}/{seq}/Images/000000.png", f"uavid_{split}/{seq}/Labels/000000.png")
        for split, seq in (("train", "seq1"), ("train", "seq2"), ("val", "seq16"))
    ]
    for seed, (image, mask) in enumerate(pairs):
        picture(root / image, seed)
        coloured(root / mask, UAVID_COLOURS[values(range(8), seed)])
    raw = UAVID_COLOURS[values(range(8), 0)]
    stray = raw.copy()
    stray[3, 4] = [1, 2, 3]
    paths = [root / path for pair in pairs for path in pair]
    return Layout(root, paths[0], paths[1], raw, paths[3], paths[4], coloured, stray)


def loveda(root: Path) -> Layout:
    pairs = [
        (f"{split}/{scene}/images_png/{n}.png", f"{split}/{scene}/masks_png/{n}.png")
        for split, scene, n in (("Train", "Rural", 0), ("Train", "Urban", 0), ("Val", "Urban", 3))
    ]
    return _set(root, pairs, list(range(8)), grey, [1, 8])


LAYOUTS: dict[str, Callable[[Path], Layout]] = {
    "folder": folder,
    "geotiff": scenes_of_geotiff,
    "cityscapes": cityscapes,
    "ade20k": ade20k,
    "voc": voc,
    "coco_stuff": coco_stuff,
    "mapillary": mapillary,
    "uavid": uavid,
    "loveda": loveda,
}
