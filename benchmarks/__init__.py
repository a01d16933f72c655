"""Benchmarks of serving with a bounded cache: `python -m benchmarks --help`."""
