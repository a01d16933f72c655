"""A small voice that runs where it runs: a speech model for vLLM, and its streaming codec."""
