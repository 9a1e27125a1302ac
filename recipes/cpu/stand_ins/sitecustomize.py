"""Python's collector runs less often. torch, vLLM and verl make millions of objects that stay, and to look for garbage
among them is a sixth of what their imports take, in each of twenty processes on two cores."""

import gc

gc.set_threshold(100_000, 50, 50)
