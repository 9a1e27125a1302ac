"""What users write, into options: every refusal names the option, what was given and what is allowed."""

from __future__ import annotations

from typing import Any

import pytest

from tensorhub_plugins.core import DEFAULT_TRANSPORTS, UsageError
from tensorhub_plugins.core.options import StoreOptions, TrainingOptions, check_training, convert
from tensorhub_plugins.core.transports import MODULES


class Needs(StoreOptions, frozen=True, kw_only=True):
    hub: str
    size: int | None = None


def test_texts_are_taken_for_what_they_spell() -> None:
    assert convert({}, StoreOptions, where="x").transports == DEFAULT_TRANSPORTS
    given = {"keep": "3", "timeout_s": "5", "verify": "true", "transports": "shm,tcp", "pull_until": "7"}
    options = convert(given, TrainingOptions, where="x")
    assert (options.keep, options.timeout_s, options.verify, options.pull_until) == (3, 5.0, True, 7)
    assert options.transports == convert({"transports": ["shm", "tcp"]}, StoreOptions, where="x").transports


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"hubb": "tcp://h:1"}, "x has no option 'hubb': did you mean 'hub'?"),
        ({"zzz": 1}, "x has no option 'zzz': the options are hub, run"),
        ({}, "x lacks option hub: give a value"),
        ({"hub": 3}, "x: option hub is 3: expected `str`, got `int`"),
        ({"hub": "", "size": "many"}, "x: option size is 'many': expected `int | null`, got `str`"),
        ({"hub": "", "install": "later"}, "x: option install is 'later': choose one of staged, direct"),
        ({"hub": "", "serve_from": "disk"}, "x: option serve_from is 'disk': choose one of host, live"),
        ({"hub": "", "location": {"planet": "p"}}, "x: option location is {'planet': 'p'}: invalid enum value"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as refused:
        convert(given, Needs, where="x")
    assert str(refused.value).startswith(says)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"hub": "h:1"}, "x: option hub is 'h:1': give the address `tensorhub server` prints"),
        ({"run": ""}, "x: option run is empty: give a value"),
        ({"transports": []}, "x: option transports is empty: name at least one"),
        ({"transports": "shm,tcpp"}, "x: option transports has 'tcpp': choose of shm, rdma, tcp, tls, cuda_ipc"),
        ({"run": "r" * 257}, "x: option run must be a text of 1 to 256 characters"),
        ({"model": "actor\a"}, "x: option model has characters that control how it is printed"),
        ({"install": "direct", "serve_from": "host"}, 'x: install="direct" keeps nothing in host memory'),
        ({"pull_until": -1}, "x: option pull_until is -1: choose a number from 0 to 999999998"),
        ({"keep": 0}, "x: option keep is 0: choose a number from 1 to 64"),
        ({"fleet_min": 0}, "x: option fleet_min is 0: choose a number from 1 to 1024"),
        ({"fleet_min": 3, "fleet_max": 2}, "x: option fleet_max is 2: choose a number from 3 to 1024"),
        ({"fleet_max": 4, "fleet_target": 5}, "x: option fleet_target is 5: choose a number from 1 to 4"),
        ({"fleet_spares": -1}, "x: option fleet_spares is -1: choose a number from 0 to 64"),
        ({"fleet_spares": 65}, "x: option fleet_spares is 65: choose a number from 0 to 64"),
        ({"fleet_policy": "my policy"}, "x: option fleet_policy is 'my policy': give a function's name"),
        (
            {"fleet_policy": "queue_length:many"},
            "x: option fleet_policy is 'queue_length:many': give a function's name",
        ),
        ({"location": {"host": "h"}}, "x: option location.host is the same on every node"),
    ],
)
def test_what_makes_no_sense_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as refused:
        check_training(convert(given, TrainingOptions, where="x"), where="x")
    assert str(refused.value).startswith(says)


def test_transports_are_all_there_are() -> None:
    given = {"transports": ",".join(MODULES), "run": "r" * 256, "pull_until": 0, "install": "direct"}
    check_training(convert(given, TrainingOptions, where="x"), where="x")


@pytest.mark.parametrize("policy", ["constant:4", "free_resources", "queue_length:16,0.5", "mine.deep.policy"])
def test_policies_are_named_with_their_numbers(policy: str) -> None:
    check_training(convert({"fleet_policy": policy}, TrainingOptions, where="x"), where="x")
