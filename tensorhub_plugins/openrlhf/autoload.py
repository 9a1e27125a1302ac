"""OpenRLHF's own command line with the store's flag, and no launcher.

    python -m openrlhf.cli.train_ppo_ray ... --vllm.sync_backend tensorhub

torch calls `install` at the end of `import torch`, in every process where this package is installed (entry point group
`torch.backends`). So it looks at the command line and does nothing unless the flag is there; it never raises. With the
flag it waits until OpenRLHF's driver has imported what is to be replaced. TORCH_DEVICE_BACKEND_AUTOLOAD=0 switches it
off, and all other back ends of torch; TENSORHUB_AUTOLOAD=0 only this.
"""

import sys

FLAG = "--vllm.sync_b"  # argparse takes its beginnings, too
SWITCH = "TENSORHUB_AUTOLOAD"
DRIVERS = ("openrlhf.cli.train_ppo_ray", "openrlhf/cli/train_ppo_ray.py")  # not our launcher, which needs no hook
# The driver's last import of something that is replaced; everything it needs has been imported then.
MODULE = "openrlhf.trainer.ray.ppo_actor"


def install() -> None:
    try:
        if any(argument.startswith(FLAG) for argument in sys.argv):
            _install()
    except Exception as error:  # whatever it is, `import torch` must not fail for it
        print(f"tensorhub: the command line was not looked at: {error!r}", file=sys.stderr)


def _install() -> None:
    import importlib.abc
    import importlib.util
    import os

    if os.environ.get(SWITCH) == "0" or not any(argument.endswith(DRIVERS) for argument in _command()):
        return

    class AfterImport(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
            if name != MODULE:
                return None
            sys.meta_path.remove(self)  # once
            spec = importlib.util.find_spec(name)
            if spec is None or spec.loader is None:
                return spec
            execute = spec.loader.exec_module

            def execute_and_switch_on(module):  # type: ignore[no-untyped-def]
                execute(module)
                _switch_on()

            spec.loader.exec_module = execute_and_switch_on  # type: ignore[method-assign]
            return spec

    sys.meta_path.insert(0, AfterImport())


def _command() -> list[str]:
    """sys.argv[0] is "-m" as long as runpy looks for the module, which is when it imports its packages."""
    return sys.orig_argv


def _switch_on() -> None:
    from tensorhub_plugins.core import TensorHubError
    from tensorhub_plugins.openrlhf import install as driver

    try:
        options = driver.options_from_argv(sys.argv)
        if options is not None:
            driver.install(options)
    except TensorHubError as error:
        driver.refuse(error)
