"""seg4k: semantic segmentation on whole 4K images, on the GPU you have."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("seg4k")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"
