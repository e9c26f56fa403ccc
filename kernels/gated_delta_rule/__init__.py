"""Implementations of gated_delta_rule."""
