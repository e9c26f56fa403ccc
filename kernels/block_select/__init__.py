"""Implementations of block_select."""
