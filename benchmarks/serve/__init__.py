"""Servers side by side on the same work: `python -m benchmarks serve`."""
