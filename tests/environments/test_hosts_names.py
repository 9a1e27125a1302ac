"""A host may have any bytes as its name, and a list of hubs addresses that lead nowhere."""

from __future__ import annotations

import socket
import time

import pytest

from tensorhub_plugins.core import Client, start_server
from tensorhub_plugins.core.cli import fetch_status
from tensorhub_plugins.core.client import arguments

SOON_S = 7.0
NO_NAMES = [f"tcp://a..{number}:1" for number in range(8)]  # of which none is looked up: no name has an empty part


@pytest.mark.parametrize("name", ["a\nb", "\x1b[31m", "\udcff\udcfe", "", "..", "a b"])
def test_a_host_with_any_name_can_be_a_worker(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TENSORHUB_HOST", raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    here = arguments.located(arguments.here())
    assert here.host.isprintable() and here.machine  # by which its containers are one host
    assert arguments.located(arguments.Location(host="other")).machine == ""


def test_a_hub_behind_addresses_that_are_none_is_found_at_once() -> None:
    """A second for each was waited."""
    with start_server() as hub:
        with Client(",".join([*NO_NAMES, hub.address]), run="r", model="m", replica="a", connect_timeout_s=SOON_S):
            assert fetch_status(hub.address)["models"]
        refuses = "tcp://127.0.0.1:1"
        began = time.monotonic()
        assert fetch_status(f"{refuses},{hub.address}", timeout_s=10 * SOON_S)["hub"]
        assert time.monotonic() - began < 4 * SOON_S  # half of the time was waited
