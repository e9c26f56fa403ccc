"""dz: a command-line toolkit for the day a large open-weight model is published."""

from importlib import metadata as _metadata

try:
    __version__ = _metadata.version("dz")
except _metadata.PackageNotFoundError:  # a bare checkout, never installed
    __version__ = "0.1.0"
