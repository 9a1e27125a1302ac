"""Fixtures of the tests that run real clients."""

from client_stage import address, module_hub, progress, small_segments, stage
from delta_stage import as_on_a_link, compiled_first

__all__ = ["address", "as_on_a_link", "compiled_first", "module_hub", "progress", "small_segments", "stage"]
