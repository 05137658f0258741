"""The layouts of data sets on disk, a module each, see `base.Format`. Nothing heavy is imported here."""

NAMES = (
    "folder",
    "geotiff",
    "cityscapes",
    "ade20k",
    "voc",
    "coco_stuff",
    "mapillary",
    "uavid",
    "loveda",
)
