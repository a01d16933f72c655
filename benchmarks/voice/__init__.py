"""`python -m benchmarks.voice`: how well the embedded voice speaks."""
