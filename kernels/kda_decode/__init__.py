"""Implementations of kda_decode."""
