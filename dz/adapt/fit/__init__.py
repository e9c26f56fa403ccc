"""Does a model fit, on what, and what would run: from headers and configuration, for a device that need not be here."""

from __future__ import annotations

from dz.adapt.fit.make import make_fit
from dz.adapt.fit.model import Context, Fit, Format, OpRow, SplitRow

__all__ = ["Context", "Fit", "Format", "OpRow", "SplitRow", "make_fit"]
