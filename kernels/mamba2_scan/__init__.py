"""Implementations of mamba2_scan."""
