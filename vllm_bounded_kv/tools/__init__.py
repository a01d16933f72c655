"""`bounded-kv`: what a cache takes, and whether an installation can serve it. Starts no engine."""
