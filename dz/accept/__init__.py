"""accept."""
