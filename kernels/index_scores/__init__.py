"""Implementations of index_scores."""
