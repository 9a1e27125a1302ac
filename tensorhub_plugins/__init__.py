"""tensorhub_plugins: a reference-oriented weight store for reinforcement learning of language models.

core       the store itself: hub, client, slabs, transports. Knows no framework.
vllm       reads weights inside vLLM's worker processes.
verl       a checkpoint engine and a rollout replica for verl.

Importing this package loads nothing else; name the part you want.
"""

__version__ = "0.1.0"
