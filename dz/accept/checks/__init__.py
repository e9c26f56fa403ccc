"""accept/checks."""
