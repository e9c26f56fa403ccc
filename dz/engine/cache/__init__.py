"""engine/cache."""
