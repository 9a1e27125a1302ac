"""Deltas: a segment as what has changed in it since other bytes that its reader holds. See codec.py and cache.py."""
