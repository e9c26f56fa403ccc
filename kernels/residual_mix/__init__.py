"""Implementations of residual_mix."""
