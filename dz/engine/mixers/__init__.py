"""engine/mixers."""
