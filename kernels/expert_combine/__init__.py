"""Implementations of expert_combine."""
