"""Implementations of mxfp4_unpack."""
