"""Fixtures of the tests that run real clients."""

from client_stage import address, module_hub, progress, small_segments, stage

__all__ = ["address", "module_hub", "progress", "small_segments", "stage"]
