"""OpenRLHF's trainer with the store, the same arguments:

    python -m tensorhub_plugins.openrlhf.train_ppo_ray ... --vllm.sync_backend tensorhub[://host:port][?option=value]

With another back end it is OpenRLHF's own trainer, unchanged.
"""

from __future__ import annotations

import runpy
import sys

from tensorhub_plugins.core import TensorHubError
from tensorhub_plugins.openrlhf.install import install, options_from_argv, refuse


def main() -> None:
    try:
        options = options_from_argv(sys.argv)
        if options is not None:
            install(options)
    except TensorHubError as error:
        refuse(error)
    runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
