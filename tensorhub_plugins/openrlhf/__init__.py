"""The weight store for OpenRLHF 0.11.2, switched on by one flag of its own command line.

    python -m tensorhub_plugins.openrlhf.train_ppo_ray ... --vllm.sync_backend tensorhub
    python -m openrlhf.cli.train_ppo_ray               ... --vllm.sync_backend tensorhub://host:7070

The second is OpenRLHF's own: with this package installed it needs no launcher (autoload.py). Options: config.py.
Importing this module does nothing at all, because vLLM imports it in each of its processes (autoload.py).
"""
