"""What operators may change: every limit has bounds, a flag, and reaches the hub and its workers."""

from __future__ import annotations

import math
import re

import pytest
from hub_scenarios import Scenario

from tensorhub_plugins.core.cli import main
from tensorhub_plugins.core.errors import UsageError
from tensorhub_plugins.core.hub.limits import LIMITS, HubLimits
from tensorhub_plugins.core.hub.server import start_server
from tensorhub_plugins.core.protocol import messages as m


def test_every_limit_has_bounds_and_words() -> None:
    assert tuple(LIMITS) == HubLimits.__struct_fields__


@pytest.mark.parametrize(
    ("field", "given", "allowed"),
    [
        ("session_timeout_s", 0.0, "a number of seconds from 0.01 to 86400"),
        ("heartbeat_s", -1, "a number of seconds from 0.01 to 86400"),
        ("grace_s", math.inf, "a number of seconds from 0 to 86400"),
        ("grace_s", math.nan, "a number of seconds from 0 to 86400"),
        ("claim_s", "120", "a number of seconds from 0 to 86400"),
        ("readers_per_source_max", 0, "a whole number from 1 to 65536"),
        ("uplink_readers_max", 2.5, "a whole number from 1 to 65536"),
        ("uplink_readers_max", True, "a whole number from 1 to 65536"),
    ],
)
def test_a_limit_out_of_bounds_names_the_field_what_was_given_and_what_is_allowed(
    field: str, given: object, allowed: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(f"{field}={given!r}: must be {allowed}")):
        HubLimits(**{field: given})


def test_a_session_must_outlive_a_heartbeat() -> None:
    with pytest.raises(UsageError, match=r"session_timeout_s=1\.0: must be more than heartbeat_s=1\.0"):
        HubLimits(session_timeout_s=1.0)
    assert HubLimits(session_timeout_s=1.0, heartbeat_s=0.5).heartbeat_s == 0.5


def test_workers_hear_the_limits_and_are_held_to_them() -> None:
    scenario = Scenario(limits=HubLimits(session_timeout_s=4.0, heartbeat_s=0.5))
    scenario.join("a/0")
    (welcome,) = scenario.inbox["a/0"]
    assert isinstance(welcome, m.Welcome) and (welcome.heartbeat_s, welcome.session_timeout_s) == (0.5, 4.0)
    scenario.silent = ("a/0",)
    scenario.wait(3.5)
    assert scenario.hub.registry.workers
    scenario.wait(1.5)
    assert not scenario.hub.registry.workers


def test_a_server_keeps_its_limits_also_after_a_fault_of_its_own() -> None:
    limits = HubLimits(grace_s=0.0)
    with start_server(limits=limits) as server:
        assert server._hub.limits is limits
        assert server._new_hub(0.0).limits is limits


def test_the_command_has_a_flag_for_each_limit(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["server", "--help"])
    text = capsys.readouterr().out
    for name in LIMITS:
        assert f"--{name.replace('_', '-')}" in text
    assert main(["server", "--address", "tcp://127.0.0.1:0", "--session-timeout-s", "0.5"]) == 1
    assert "session_timeout_s=0.5: must be more than heartbeat_s=1.0" in capsys.readouterr().err
