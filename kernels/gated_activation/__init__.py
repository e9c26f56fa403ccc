"""Implementations of gated_activation."""
