"""Implementations of mla_decode."""
