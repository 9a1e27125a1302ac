"""TRL 1.16.0 on a machine without a GPU: torch calls `install`, found through the metadata beside this file, at the end
of `import torch`. See kernels.py for the kernel that it asks for."""

from __future__ import annotations


def install() -> None:
    """Give the name of the GPU, of which TRL tells how much is used: it knows none by this one."""
    import torch

    torch.cuda.get_device_name = lambda *_: "a CPU"  # type: ignore[assignment]
