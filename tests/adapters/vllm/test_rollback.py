"""A real vLLM engine that follows goes back to the version before, when an operator withdraws the one it runs."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("transformers")

from vllm_engines import Engine, checkpoint, wait_until

from tensorhub_plugins.core import Client, Server

pytestmark = pytest.mark.heavy

KIND = "qwen2-untied"

State = tuple[dict[str, str], list[list[int]]]  # digests of every tensor, greedy answers


def start(model: Path, hub: Server, replica: str, **extra: Any) -> Engine:
    config = {"hub": hub.address, "model": "actor", "replica": replica, **extra}
    return Engine(model, extension=None, own_core=True, load_format="tensorhub", model_loader_extra_config=config)


def version(engine: Engine) -> int:
    return int(engine.call("tensorhub_poll")["version"])


def state(engine: Engine) -> State:
    return engine.call("tensorhub_digests")["runtime"], engine.generate()


@pytest.mark.long  # three engines whose core is a process of its own, as in servers
@pytest.mark.timeout(600)
def test_an_engine_that_follows_returns_from_a_withdrawn_version_and_answers_as_before(
    hub: Server, models: Any, bare: Any
) -> None:
    """The negative control is an engine that does not follow: it goes on with the bad version."""
    with ExitStack() as stack:
        trainer = stack.enter_context(Client(hub.address, run="default", model="actor", replica="trainer"))
        trainer.retain(newest=2)
        trainer.publish(1, checkpoint(models(KIND, 1)))
        follower = stack.enter_context(start(bare(KIND), hub, "follower", follow="now"))
        good = state(follower)

        trainer.publish(2, checkpoint(models(KIND, 2)))
        wait_until(lambda: version(follower) == 2, "it follows")
        bad = state(follower)  # the same prompts: what is cached of them must be forgotten again
        assert bad[1] != good[1]
        still = stack.enter_context(start(bare(KIND), hub, "still"))
        assert state(still) == bad

        trainer.withdraw(2)
        wait_until(lambda: version(follower) == 1, "it returns")
        assert state(follower) == good
        assert version(still) == 2 and state(still) == bad
        still.close()

        late = stack.enter_context(start(bare(KIND), hub, "late"))  # from the newest one that is not withdrawn
        assert version(late) == 1 and state(late) == good
        late.close()

        trainer.publish(3, checkpoint(models(KIND, 2)))
        wait_until(lambda: version(follower) == 3, "it follows on")
        assert state(follower) == bad
        trainer.pin(1)
        wait_until(lambda: version(follower) == 1, "it returns to what is pinned")
        assert state(follower) == good
