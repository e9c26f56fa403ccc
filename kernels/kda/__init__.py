"""Implementations of kda."""
