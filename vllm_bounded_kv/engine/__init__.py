"""Everything that knows vLLM: the bounded cache inside vLLM's own scheduler and workers."""
