"""Implementations of index_topk."""
