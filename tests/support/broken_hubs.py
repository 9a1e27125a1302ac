"""Hubs that break a rule on purpose, for the negative controls of more than one test."""

from __future__ import annotations

from typing import Any

from tensorhub_plugins.core.hub.hub import Hub


class ForgetsLeases(Hub):
    def _lease(self, *lease: Any) -> None:
        pass


class DropsLastCopies(Hub):
    def _is_last_copy(self, *holding: Any) -> bool:
        return False
