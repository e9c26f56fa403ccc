"""One file for each op that has a bench: its WORKLOAD."""
