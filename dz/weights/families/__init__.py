"""Families of quantised weights: how each is recognised from headers and configuration, its logical shape, its bits a
weight, and whether dz loads it. One file a family; `recognise` asks them all and checks them against each other."""

from __future__ import annotations

from dz.weights.families.base import Family, Stored
from dz.weights.families.recognise import FAMILIES, Recognised, quantization, recognise

__all__ = ["FAMILIES", "Family", "Recognised", "Stored", "quantization", "recognise"]
