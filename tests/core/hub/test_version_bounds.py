"""No number, by a slip or on purpose, keeps readers from the versions that come (attack 3)."""

from __future__ import annotations

import pytest
from hub_scenarios import Scenario
from transport_suite.material import sample_tensors

from tensorhub_plugins.core import Client, UsageError, start_server
from tensorhub_plugins.core.client import session as s
from tensorhub_plugins.core.errors import ProtocolError
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.protocol.directive import Directive
from tensorhub_plugins.core.types import CHECKPOINT, STEPS_AHEAD_MAX, VERSION_MAX, Location, ShardKey, version_of

FAR = 7 + STEPS_AHEAD_MAX


@pytest.fixture
def scenario() -> Scenario:
    story = Scenario()
    story.join_all("trainer/0", "rollout/0", "other/0")
    story.publish("trainer/0", 7)
    return story


def answer(scenario: Scenario, worker: str = "trainer/0") -> m.HubMessage:
    return scenario.inbox[worker][-1]


@pytest.mark.parametrize(
    "number",
    [FAR + 1, 1_700_000_000, VERSION_MAX, VERSION_MAX - 1, version_of(1, STEPS_AHEAD_MAX + 1)],
    ids=["one too many", "a time", "2^48", "below 2^48", "another attempt's"],
)
def test_a_version_far_ahead_is_refused_and_nobody_notices(scenario: Scenario, number: int) -> None:
    scenario.publish("trainer/0", number)
    refused = answer(scenario)
    assert isinstance(refused, m.Refused) and refused.error == "UsageError"
    assert f"version {number} is " in refused.message and "publish the framework's global step" in refused.message
    scenario.publish("trainer/0", 8)
    scenario.say("rollout/0", m.Wait, version=0, newer_than=7, timeout_s=5.0)
    assert scenario.heard("rollout/0") == ["visible 8"]


@pytest.mark.parametrize("number", [FAR, version_of(1, 8 + STEPS_AHEAD_MAX)])
def test_the_control_what_may_be_is_taken(scenario: Scenario, number: int) -> None:
    if number > FAR:
        scenario.say("trainer/0", m.Begin, step=8, timeout_s=5.0)
    scenario.publish("trainer/0", number)
    assert isinstance(answer(scenario), m.Done)


@pytest.mark.parametrize("number", [version_of(1, 8), version_of(200_000, 1)])
def test_an_attempt_that_nobody_has_begun_is_refused(scenario: Scenario, number: int) -> None:
    scenario.publish("trainer/0", number)
    refused = answer(scenario)
    assert isinstance(refused, m.Refused) and "that attempt was not begun" in refused.message


@pytest.mark.parametrize("number", [0, -1, VERSION_MAX + 1, 1 << 63])
def test_what_is_no_version_is_no_message(number: int) -> None:
    with pytest.raises(ProtocolError, match="malformed message: Expected `int` "):
        m.decode_from_client(m.encode(m.Publish(1, m.Holding(ShardKey(number, CHECKPOINT), b"r" * 16, 1))))


def test_a_restarted_hub_believes_what_is_held(scenario: Scenario) -> None:
    held = (m.Holding(ShardKey(5 * STEPS_AHEAD_MAX, CHECKPOINT), b"r" * 16, 1),)
    restarted = Scenario(recovering=True)
    restarted.join("trainer/0", holdings=held)
    restarted.publish("trainer/0", 5 * STEPS_AHEAD_MAX + 1)
    assert isinstance(answer(restarted), m.Done)
    scenario.join("late/0", holdings=held)  # the control: to a hub that knows better
    assert any("steps above the newest of run/actor (7)" in line for line in scenario.logged)


def test_a_newest_version_that_is_withdrawn_is_forgotten(scenario: Scenario) -> None:
    scenario.publish("trainer/0", FAR)
    scenario.acquire("rollout/0")
    assert scenario.heard("rollout/0")[0].startswith(f"read {FAR} ")
    scenario.say("trainer/0", m.Withdraw, version=FAR, timeout_s=5.0)
    scenario.heard("rollout/0")
    for number in (8, 9):
        scenario.say("other/0", m.Wait, version=number, newer_than=0, timeout_s=5.0)  # not gone: still to come
        assert scenario.heard("other/0")[-1:] != ["refused VersionGone"]
        scenario.publish("trainer/0", number)
        assert scenario.heard("other/0")[-1:] == [f"visible {number}"]
    scenario.acquire("rollout/0")
    assert scenario.heard("rollout/0")[0].startswith("read 9 ")
    scenario.publish("trainer/0", FAR + 3)  # 9 is the newest again
    assert isinstance(answer(scenario), m.Refused) is (FAR + 3 > 9 + STEPS_AHEAD_MAX)
    worker = scenario.hub.registry.workers[scenario.sessions["rollout/0"]]
    assert worker.seen_version == 9


def test_a_client_forgets_it_too_and_says_so_in_its_next_hello() -> None:
    session = s.Session(m.Hello("r", "m", "a", 0, 1, Location(), {}), 0.0)

    def hear(message: m.HubMessage) -> list[s.Effect]:
        return session.handle(s.Heard(message), 1.0)

    hear(m.Welcome(b"h" * 16, 1.0, 15.0, 1))
    session.handle(s.Ask(m.Wait(session.next_request_id(), 0, 0, 9.0), 9.0), 1.0)
    hear(m.Visible(session.last_request_id, FAR))
    assert session.seen == FAR
    hear(m.Alive((), Directive(1, 0, (FAR,))))
    (said,) = hear(m.Unknown(b"i" * 16))
    assert isinstance(said, s.Send) and isinstance(said.message, m.Hello) and said.message.seen == 0
    hear(m.Welcome(b"i" * 16, 1.0, 15.0, said.message.request_id))
    session.handle(s.Ask(m.Wait(session.next_request_id(), 0, 0, 9.0), 9.0), 1.0)
    hear(m.Visible(session.last_request_id, FAR))  # late, from before
    assert session.seen == 0


def test_a_slip_of_one_does_not_keep_the_next_from_readers() -> None:
    tensors = sample_tensors(1)
    with (
        start_server() as hub,
        Client(hub.address, run="r", model="m", replica="trainer", transports=("tcp",)) as trainer,
        Client(hub.address, run="r", model="m", replica="rollout", transports=("tcp",)) as rollout,
    ):
        trainer.publish(1, tensors)
        with pytest.raises(UsageError, match="steps above the newest of r/m"):
            trainer.publish(1 << 47, tensors)
        assert rollout.wait() == 1
        trainer.publish(2, tensors)
        assert rollout.wait(newer_than=1) == 2
