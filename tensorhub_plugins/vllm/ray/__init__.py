"""Runs in Ray actors: those that own engines, and the hub as one."""
