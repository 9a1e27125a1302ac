"""OpenRLHF's own command line with the store's flag, and no launcher.

    python -m openrlhf.cli.train_ppo_ray ... --vllm.sync_backend tensorhub

vLLM calls `install` while it looks for its platform, at its import (entry point group `vllm.platform_plugins`): early
enough for OpenRLHF's driver, which imports vLLM first, and only in processes that use vLLM. vLLM goes on where the call
or its import fails. With the flag, this waits until the driver has imported what is to be replaced.
"""

import sys

FLAG = "--vllm.sync_b"  # argparse takes its beginnings, too
DRIVERS = ("openrlhf.cli.train_ppo_ray", "openrlhf/cli/train_ppo_ray.py")  # not our launcher, which needs no hook
# The driver's last import of something that is replaced; everything it needs has been imported then.
MODULE = "openrlhf.trainer.ray.ppo_actor"


def install() -> None:
    """Return that this is no platform of vLLM's, having prepared OpenRLHF's driver if it has the flag."""
    if not any(argument.startswith(FLAG) for argument in sys.argv):
        return
    # sys.argv[0] is "-m" as long as runpy looks for the module, which is when it imports its packages.
    if not any(argument.endswith(DRIVERS) for argument in sys.orig_argv):
        return
    from tensorhub_plugins.vllm.plugin import after_import

    after_import({MODULE: _switch_on})


def _switch_on(_module: object) -> None:
    from tensorhub_plugins.core import TensorHubError
    from tensorhub_plugins.openrlhf import install as driver

    try:
        options = driver.options_from_argv(sys.argv)
        if options is not None:
            driver.install(options)
    except TensorHubError as error:
        driver.refuse(error)
