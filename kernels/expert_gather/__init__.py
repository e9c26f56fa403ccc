"""Implementations of expert_gather."""
