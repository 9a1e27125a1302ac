"""What "latest" means to the shards of a replica whose processes start again, some of them more often than others."""

from __future__ import annotations

import pytest
from hub_scenarios import Scenario

from tensorhub_plugins.core.protocol import messages as m


@pytest.fixture
def scenario() -> Scenario:
    return Scenario()


def test_they_agree_though_one_has_left_whose_former_process_was_killed(scenario: Scenario) -> None:
    """That one is not taken for dead yet, and gets its place back."""
    scenario.join_all("trainer/0")
    scenario.sessions["killed/0"] = start_again(scenario, b"1", (0, 1))["rollout/0"]
    scenario.sessions["left/1"] = start_again(scenario, b"2", (0, 1))["rollout/1"]
    start_again(scenario, b"3", (0,))
    scenario.publish("trainer/0", 1)
    scenario.acquire("rollout/0")
    scenario.publish("trainer/0", 2)
    scenario.tell("left/1", m.Bye())
    start_again(scenario, b"3", (1,))
    scenario.acquire("rollout/1")
    assert [scenario.heard(f"rollout/{shard}")[0].split()[1] for shard in (0, 1)] == ["1", "1"]
    scenario.tell("killed/0", m.Bye())  # what leaves later changes nothing
    for shard in (0, 1):  # the next generation
        scenario.acquire(f"rollout/{shard}")
        assert scenario.heard(f"rollout/{shard}")[0].split()[1] == "2"


def test_they_agree_though_one_that_was_answered_in_anothers_place_has_left(scenario: Scenario) -> None:
    scenario.join_all("trainer/0")
    scenario.publish("trainer/0", 1)
    former = start_again(scenario, b"1", (0, 1))
    start_again(scenario, b"2", (0,))
    scenario.acquire("rollout/0")
    scenario.tell("rollout/0", m.Bye())
    scenario.sessions |= former
    scenario.publish("trainer/0", 2)
    for shard in (1, 0):
        scenario.acquire(f"rollout/{shard}")
        assert scenario.heard(f"rollout/{shard}")[-1].split()[1] == "1"


def start_again(scenario: Scenario, session: bytes, shards: tuple[int, ...]) -> dict[str, bytes]:
    """Let other processes send Hello as shards of a replica of two; return their sessions."""
    for shard in shards:
        scenario.sessions[f"rollout/{shard}"] = session * 15 + bytes([shard])
        scenario.join(f"rollout/{shard}", 2)
    return {f"rollout/{shard}": scenario.sessions[f"rollout/{shard}"] for shard in shards}
