"""Benches: what a kernel takes, what it could take at best, and what others take, measured in one process."""
