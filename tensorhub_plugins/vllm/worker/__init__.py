"""The store's code inside vLLM's worker processes."""
