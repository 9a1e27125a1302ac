"""Fixtures of the tests that run real clients."""

from client_stage import module_hub, progress, small_segments, stage

__all__ = ["module_hub", "progress", "small_segments", "stage"]
