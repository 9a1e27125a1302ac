"""Inside vLLM's worker processes."""
