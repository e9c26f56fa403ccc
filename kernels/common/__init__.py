"""Shared by the kernels: launch, refusals, tuned configurations."""
