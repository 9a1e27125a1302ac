"""The transport within one host: shared memory, and live tensors read by their addresses."""
