"""Attention over a bounded stream. `reference` is the plain version that the others must equal."""
