"""Implementations of causal_conv."""
