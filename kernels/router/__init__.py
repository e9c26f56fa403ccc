"""Implementations of router."""
