"""Benchmarks of serving with a bounded cache against stock vLLM: `python -m benchmarks`."""
