"""Implementations of expert_permute."""
