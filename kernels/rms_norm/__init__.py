"""Implementations of rms_norm."""
