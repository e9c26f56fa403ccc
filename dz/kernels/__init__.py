"""The door to the kernels folder; the implementations lie outside the package, one folder an op."""

from dz.shipped import folders

__path__ = [str(p) for p in folders("kernels")]
