"""Computations on a device's memory: by Triton where there is, else by torch, with equal results."""
