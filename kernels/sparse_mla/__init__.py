"""Implementations of sparse_mla."""
