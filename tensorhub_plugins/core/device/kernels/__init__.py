"""Computations on device memory: by Triton where available, else by torch, with equal results."""
