"""Implementations of mxfp4_to_fp8."""
