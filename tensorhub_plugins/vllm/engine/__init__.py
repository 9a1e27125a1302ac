"""Beside an engine, in the process of its scheduler or of its owner."""
