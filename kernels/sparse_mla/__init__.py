"""Latent attention over chosen cache rows."""
