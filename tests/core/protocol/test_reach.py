"""What is said of sources that a reader cannot connect to."""

from __future__ import annotations

import pytest

from tensorhub_plugins.core.protocol.reach import is_of_one_host, unreached

TCP = {"shm": "shm://1", "tcp": "tcp://10.0.0.1:5000"}


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.1.1", "localhost", "[::1]", "169.254.3.4", "[fe80::1%eth0]"])
@pytest.mark.parametrize("scheme", ["tcp", "tls", "rdma"])
def test_addresses_of_one_host(scheme, host):
    assert is_of_one_host(f"{scheme}://{host}:5000")


@pytest.mark.parametrize(
    "host", ["10.127.0.1", "128.0.0.1", "localhost.example", "[fd77::1]", "169.25.4.1", "[2001::fe80:1]"]
)
def test_addresses_of_more(host):
    assert not is_of_one_host(f"tcp://{host}:5000")


def test_who_cannot_reach_whom_where_and_what_to_set():
    said = unreached("trainer/0", TCP, ["rollout-0/0 on b"])
    assert said.startswith(
        "rollout-0/0 on b cannot connect to trainer/0 at tcp://10.0.0.1:5000: set TENSORHUB_ADVERTISE"
    )
    assert "TENSORHUB_ADVERTISE" in said and "TENSORHUB_INTERFACE" in said and "TENSORHUB_PORTS" in said
    said = unreached("it", {"tcp": "tcp://127.0.0.1:1"}, ["a", "b", "c", "d", "e"])
    assert said.startswith(
        "a, b, c and 2 more cannot connect to it at tcp://127.0.0.1:1, an address of its own host alone:"
    )
    assert unreached("it", {"shm": "shm://1"}, ["a"]).startswith("a cannot connect to it as it serves no other host:")
