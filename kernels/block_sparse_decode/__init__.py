"""Implementations of block_sparse_decode."""
