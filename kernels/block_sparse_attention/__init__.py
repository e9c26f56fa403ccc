"""Implementations of block_sparse_attention."""
