"""What the tests share: tiny models and independent oracles."""
