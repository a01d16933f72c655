"""Perplexity of long real text under every scheme: `python -m benchmarks.quality`."""
