"""What can never work is refused in words that say what to do, before anything moves."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from client_processes import hold_back, tensors_of
from client_stage import HELD, LATE_S, RUNTIME, SOON_S, holders, leases, until, what_is_there

from tensorhub_plugins.core import (
    CHECKPOINT,
    Client,
    HubLimits,
    HubUnreachable,
    Location,
    Part,
    Publisher,
    ShardKey,
    TensorTable,
    UsageError,
    VersionRefused,
    machine,
    resources,
    spec_of,
    start_server,
)
from tensorhub_plugins.core.cli import fetch_status
from tensorhub_plugins.core.errors import ResourceRefused
from tensorhub_plugins.core.memory import moves as reads
from tensorhub_plugins.core.protocol import messages

# --- what can never work, in words ---


def test_other_bytes_under_the_same_version(stage):
    trainer, other = stage.client("trainer"), stage.client("other")
    trainer.publish(1, tensors_of(1))
    with pytest.raises(UsageError, match="other bytes are already published.*use a higher version"):
        other.publish(1, tensors_of(2))
    assert other.serving() == [] and holders(trainer, 1) == ("trainer/0",)
    other.publish(1, tensors_of(1))  # the control: the same bytes are welcome
    assert holders(trainer, 1) == ("other/0", "trainer/0")


def test_versions_only_grow(stage):
    trainer = stage.client("trainer")
    trainer.publish(2, tensors_of(1))
    for version in (1, 2):
        with pytest.raises(UsageError, match="unpublish it first|versions only grow"):
            trainer.publish(version, tensors_of(1))
    trainer.publish(2, tensors_of(1), RUNTIME)
    trainer.publish(3, tensors_of(1))
    trainer.unpublish(2)
    with pytest.raises(UsageError, match="version 3 of layout checkpoint was published here before"):
        trainer.publish(2, tensors_of(1))


CHANGES = {
    "missing": (lambda t: t.pop("rest"), "1 missing: 'rest'"),
    "new": (lambda t: t.update({f"new{i}": torch.ones(1) for i in range(7)}), "7 new: 'new0', .*'new4' and 2 more"),
    "dtype": (lambda t: t.update(mask=t["mask"].int()), r"'mask' \(expected bool\[1000\], given int32\[1000\]\)"),
    "shape": (
        lambda t: t.update(empty=torch.empty(7, 0)),
        r"'empty' \(expected float32\[0, 7\], given float32\[7,",
    ),
}


@pytest.mark.parametrize("copy", [True, False], ids=["copied", "adopted"])
@pytest.mark.parametrize("change", CHANGES)
def test_other_tensors_than_in_the_version_before(stage, caplog, change, copy):
    client = stage.client("trainer")
    change, words = CHANGES[change]
    client.publish(1, tensors_of(1), copy=copy, strict=True)
    client.publish(2, tensors_of(2), copy=copy)
    other = tensors_of(3)
    change(other)
    before = what_is_there()
    with pytest.raises(UsageError, match=f"{words}.* Nothing was published.* new run or model name.* strict=False"):
        client.publish(3, other, copy=copy, strict=True)
    assert what_is_there() == before and [key.version for key in client.serving()] == [1, 2]
    assert caplog.text == "" and all(slab.specs == spec_table(tensors_of(1)) for slab in client._serving.pool._free)
    client.publish(3, other, "other layout", copy=copy, strict=True)  # the first of it

    client.publish(3, other, copy=copy)
    assert len(caplog.records) == 1 and re.search(words, caplog.text) and "version 3" in caplog.text
    client.publish(4, other, copy=copy, strict=True)  # it is what was published before by now
    assert len(caplog.records) == 1


def spec_table(tensors: dict[str, torch.Tensor]) -> TensorTable:
    return TensorTable.of(spec_of(name, tensor) for name, tensor in tensors.items())


def test_a_shard_of_several_may_hold_other_tensors_but_no_others_of_that_name(stage, caplog):
    tensors = {name: torch.ones(8, 4) for name in ("a", "b", "c")}
    client = stage.client("trainer", shard=0, shard_count=2)
    client.publish(1, {name: tensors[name] for name in ("a", "b")}, strict=True)
    client.publish(2, {name: tensors[name] for name in ("b", "c")}, strict=True)
    rows = {"b": Part((8, 4), (4, 0))}
    client.publish(3, {"b": torch.ones(4, 4)}, parts=rows, strict=True)  # half of it went to the other shard
    with pytest.raises(UsageError, match=r"1 changed: 'b' \(expected float32\[4, 4\] at"):
        client.publish(4, {"b": torch.ones(4, 4)}, strict=True)
    client.publish(4, {"b": torch.ones(4, 4), "c": tensors["c"]}, RUNTIME, strict=True)
    with pytest.raises(UsageError, match="1 missing: 'c'"):  # an engine's own parameters do not move
        client.publish(5, {"b": torch.ones(4, 4)}, RUNTIME, strict=True)
    assert caplog.text == ""


def test_equal_tables_are_never_compared_tensor_by_tensor(stage, monkeypatch):
    client = stage.client("trainer")
    monkeypatch.setattr(reads, "_is_like", None)
    tables = [
        client.publish(version, tensors_of(version), strict=True).manifest.tensors for version in (1, 2, 3)
    ]  # a slab of its own each
    client.unpublish(1)
    tables.append(client.publish(4, tensors_of(4), strict=True).manifest.tensors)
    assert all(table is tables[0] for table in tables)


def test_a_version_taken_back_may_return_with_the_same_bytes(stage):
    """As an engine's does, whose weights leave their memory while it sleeps."""
    engine, other = stage.client("engine"), stage.client("other")
    other.publish(2, tensors_of(1))  # so that the engine's is not the last copy, which would be kept
    engine.publish(2, tensors_of(1))
    engine.unpublish(2)
    with pytest.raises(UsageError, match="version 2 of layout checkpoint was published here before with other bytes"):
        engine.publish(2, tensors_of(2))
    assert holders(other, 2) == ("other/0",)
    engine.publish(2, tensors_of(1))
    assert holders(other, 2) == ("engine/0", "other/0")


@pytest.mark.parametrize(
    ("name", "mine", "words"),
    [
        ("w", torch.zeros(4, 6, dtype=torch.float16), r"'w' is float32\[4, 6\] at the source but float16\[4, 6\]"),
        ("w", torch.zeros(6, 4), r"'w' is float32\[4, 6\] at the source but float32\[6, 4\]"),
        ("w", torch.zeros(6, 4).t(), r"'w' is float32\[4, 6\] at the source but .*strided \(1, 4\)"),
        ("v", torch.zeros(4, 6), r"1 tensors would not be updated.*first \['v'\]"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(stage, name, mine, words):
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    trainer.publish(1, {"w": torch.ones(4, 6)})
    with pytest.raises(UsageError, match=words):
        rollout.replicate({name: mine})
    assert rollout.serving() == [] and holders(trainer, 1) == ("trainer/0",)
    assert fetch_status(stage.address) and not leases(stage)


def test_what_cannot_be_a_target_is_refused_before_anything_moves(stage):
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    with pytest.raises(UsageError, match="'w'.*pass a contiguous copy"):
        rollout.replicate({"w": torch.zeros(8, 8)[:, ::2]})
    with pytest.raises(UsageError, match="'w'.*meta device"):
        trainer.publish(1, {"w": torch.zeros(8, device="meta")})
    live = tensors_of(1)
    trainer.publish(1, live, copy=False)
    with pytest.raises(UsageError, match="these tensors are published: unpublish that version before they change"):
        trainer.replicate(live)


class Name(str):
    __slots__ = ()


ONE = torch.ones(2, 2)
BAD_TENSORS = {
    "a list": ([ONE], "the tensors are a list: pass a mapping of name to tensor"),
    "nothing": (None, "the tensors are a NoneType"),
    "a module": (torch.nn.Linear(2, 2), r"the tensors are a Linear: pass its state_dict\(\)"),
    "a number as name": ({3: ONE}, "the name 3 of a tensor is a int: pass a plain str"),
    "names of two kinds": ({3: ONE, "a": ONE}, "the name 3 of a tensor is a int"),
    "bytes as name": ({b"a": ONE}, "the name b'a' of a tensor is a bytes"),
    "another str": ({Name("b"): ONE}, "the name 'b' of a tensor is a Name"),
    "half a surrogate pair": ({"a\ud800": ONE}, r"the name 'a\\ud800' of a tensor holds half a surrogate pair"),
    "no tensor": ({"a": ONE, "extra": None}, "'extra' is a NoneType, not a tensor: leave it out"),
    "an array": ({"a": ONE.numpy()}, "'a' is a ndarray, not a tensor"),
}
BAD_OPTIONS = {
    "a text as deadline": ({"timeout_s": "60"}, "timeout_s='60'"),
    "not a number": ({"timeout_s": float("nan")}, "timeout_s=nan"),
    "half a surrogate pair as layout": ({"layout": "\ud800"}, "layout must be a text"),
    "a list of parts": ({"parts": [1]}, "the parts are a list"),
    "a number as part": ({"parts": {"a": 1}}, "the part of tensor 'a' is a int, not a Part"),
    "a part in floats": ({"parts": {"a": Part((4, 2), (0.0, 0))}}, "tensor 'a' is said to be .*: pass tuples of int"),
    "a part in lists": ({"parts": {"a": Part([4, 2], [0, 0])}}, "tensor 'a' is said to be .*: pass tuples of int"),
}


def test_a_name_of_two_shards_must_have_the_same_bytes(stage):
    """Else one of them would win, by the order in which they came."""
    ranks = [stage.client("trainer", shard=shard, shard_count=2) for shard in (0, 1)]
    reader = stage.client("reader")
    for version, shared in enumerate([(ONE, ONE), (ONE, ONE + 1)], start=1):
        for shard, rank in enumerate(ranks):
            rank.publish(version, {"shared": shared[shard], f"own{shard}": ONE})
        fetched = reader.fetch(version)
        if version == 1:
            assert sorted(fetched.tensors()) == ["own0", "own1", "shared"]
        else:
            with pytest.raises(VersionRefused, match="'shared' is published by shard 0 and by shard 1, with different"):
                fetched.tensors()


@pytest.mark.parametrize("copy", [True, False], ids=["copied", "adopted"])
@pytest.mark.parametrize("bad", [*BAD_TENSORS, *BAD_OPTIONS])
def test_what_cannot_be_published_is_named_and_nothing_of_it_is(stage, bad, copy):
    tensors, words = BAD_TENSORS.get(bad, ({"a": ONE}, ""))
    options, words = BAD_OPTIONS.get(bad, ({}, words))
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    trainer.publish(1, {"a": ONE}, copy=copy)
    before = what_is_there()
    with pytest.raises(UsageError, match=words):
        trainer.publish(2, tensors, copy=copy, **options)
    assert trainer.serving() == [ShardKey(1, CHECKPOINT)] and rollout.wait() == 1
    assert what_is_there() == before or len(trainer._serving.pool._free) == 1  # which the next version is written into
    with pytest.raises(UsageError, match=words):
        rollout.replicate(tensors, 1, **options)
    trainer.publish(2, {"a": ONE}, copy=copy)  # the control
    assert rollout.fetch(2).tensors()["a"].tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda c: c.publish(0, {}), "positive integer"),
        (lambda c: c.publish(1, {}, layout=""), "layout must be a text of 1 to 256"),
        (lambda c: c.publish(1, {}, layout="x" * 300), "layout must be a text of 1 to 256"),
        (lambda c: c.unpublish("1"), "positive integer"),
        (lambda c: c.replicate({}, version=-1), "positive integer"),
        (lambda c: c.replicate({}, version="newest"), "positive integer"),
        (lambda c: c.replicate({}, layout=""), "layout must be"),
        (lambda c: c.fetch(layouts=()), "a list of 1 to 8 layouts"),
        (lambda c: c.fetch(layouts="checkpoint"), "a list of 1 to 8 layouts"),
        (lambda c: c.fetch(layouts=("x", 7)), "layout must be"),
        (lambda c: c.abandon(0, "x"), "positive integer"),
        (lambda c: c.wait(timeout_s=None), "timeout_s=None: pass a number of seconds"),
        (lambda c: c.replicate({}, timeout_s="1"), "timeout_s='1'"),
        (lambda c: c.wait(newer_than=-1), "positive integer"),
        (lambda c: c.target(-1), "positive integer"),
        (lambda c: c.target(refused=(0,)), "positive integer"),
        (lambda c: c.pin(0), "positive integer"),
        (lambda c: c.withdraw("newest"), "positive integer"),
        (lambda c: c.retain(-1), "a count of versions from 0 to 1024"),
        (lambda c: c.retain(2000), "a count of versions from 0 to 1024"),
        (lambda c: c.fetch(layouts=7), "a list of 1 to 8 layouts"),
        (lambda c: c.fetch(wanted=[1]), "1 is no TensorSpec"),
        (lambda c: c.fetch(wanted=1), "1: give a list of TensorSpec"),
        (lambda c: c.allocate([None]), "None is no TensorSpec"),
    ],
)
def test_what_makes_no_sense_is_refused_here_and_now(stage, call, words):
    client = stage.client("a")
    began = time.monotonic()
    with pytest.raises(UsageError, match=words):
        call(client)
    assert time.monotonic() - began < LATE_S


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"run": ""}, "run must be a text"),
        ({"model": "m" * 257}, "model must be a text"),
        ({"replica": None}, "replica must be a text"),
        ({"shard": 2, "shard_count": 2}, "shards count from 0"),
        ({"shard": -1}, "shards count from 0"),
        ({"shard": "0"}, "shard '0' of 1: shards count from 0"),
        ({"shard_count": None}, "shard 0 of None: shards count from 0"),
        ({"shard": True, "shard_count": 2}, "shards count from 0"),
        ({"keys": "secret"}, "a str is no key: `keys_from_environment` reads"),
        ({"transports": ()}, "none of the transports"),
        ({"transports": ("tcp", "carrier pigeon")}, "no transport 'carrier pigeon'; known are"),
        ({"address": "nowhere"}, "use tcp://host:port"),
        ({"address": 5}, "use tcp://host:port"),
        ({"address": "tcp://\ud800:1", "advertise_host": "127.0.0.1"}, "use tcp://host:port"),
        ({"address": "tcp://no.such.host.invalid:1"}, "correct the host's name"),
        ({"advertise_host": "0.0.0.0"}, "cannot be connected to"),
        ({"memory_budget_bytes": "1 GB"}, "memory_budget_bytes='1 GB': a number of bytes"),
        ({"over_budget": "refused"}, "over_budget='refused': 'warn' or 'refuse'"),
        ({"transports": 1}, "transports=1: a list of names"),
        ({"transports": "tcp"}, "transports='tcp': a list of names"),
        ({"transports": [[]]}, "a list of names"),
        ({"advertise_host": "a..b"}, "advertise_host='a..b' is not an address"),
        ({"advertise_host": 5}, "advertise_host=5: a text"),
        ({"connect_timeout_s": "5"}, "connect_timeout_s='5': pass a number of seconds"),
        ({"connect_timeout_s": float("nan")}, "connect_timeout_s=nan: pass a number of seconds"),
        ({"location": "x"}, "location='x': a Location"),
        ({"location": Location(host="\ud800")}, "location.host=.*a text of at most 256 characters"),
        ({"location": Location(rack="x" * 300)}, "location.rack=.*a text of at most 256 characters"),
        ({"preemptible": "no"}, "Hello.* has a value of no use"),
    ],
)
def test_a_client_that_cannot_work_is_refused(stage, options, words):
    arguments = {"address": stage.address, "run": "r", "model": "m", "replica": "x", **options}
    with pytest.raises(UsageError, match=words):
        Client(arguments.pop("address"), **arguments)


def test_a_client_may_wait_for_its_hub_for_ever(stage):
    stage.client("x", connect_timeout_s=float("inf")).versions()


BAD_WORDS = ["\ud800", np.str_("x"), 1, None, "x" * 300, "a\nb"]


@pytest.mark.parametrize("word", BAD_WORDS, ids=repr)
def test_a_word_that_no_message_can_hold_is_refused_and_the_link_lives(stage, word):
    client = stage.client("a")
    with pytest.raises(UsageError, match="launch_id=.*a text of at most 256 characters"):
        client.begin(0, launch_id=word, timeout_s=1.0)
    assert client.begin(0, launch_id="x") == 0


@pytest.mark.parametrize("word", BAD_WORDS, ids=repr)
def test_what_the_hub_would_not_read_is_refused_before_anything_is_kept_of_it(stage, word):
    """Whatever a caller has not looked at: what is kept is sent again by the link's thread, which would end."""
    client = stage.client("a")
    with pytest.raises(UsageError, match=r"what the hub is told \(Begin\) has a value of no use"):
        client._hub.ask(lambda n: messages.Begin(n, 0, 1.0, word), time.monotonic() + SOON_S)
    assert client._hub._machine.asked == client._hub._asked == {}
    client.versions()


def test_a_flag_of_numpy_is_one(stage):
    client = stage.client("a")
    client.publish(1, tensors_of(1))
    assert client.target(pins=np.bool_(True)) == 1


def test_no_hub_at_the_address():
    began = time.monotonic()
    with pytest.raises(HubUnreachable, match="start one with `tensorhub server`"):
        Client("tcp://127.0.0.1:1", run="r", model="m", replica="x", connect_timeout_s=0.3)
    assert time.monotonic() - began < LATE_S


def test_a_closed_client_says_so_and_closing_twice_is_fine(stage):
    client = stage.client("a")
    client.publish(1, tensors_of(1))
    client.close()
    client.close()
    with client:
        pass
    calls: list[Callable[[], Any]] = [
        lambda: client.publish(2, {}),
        lambda: client.unpublish(1),
        lambda: client.replicate({}),
        client.fetch,
        client.wait,
        client.versions,
        client.retain,
        lambda: client.allocate([]),
        lambda: client.abandon(1, "x"),
    ]
    for call in calls:
        with pytest.raises(UsageError, match="the client is closed"):
            call()
    assert client.find(ShardKey(1, CHECKPOINT)) is None and client.serving() == []


def test_closing_ends_what_other_threads_do_with_the_client(stage, progress):
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    trainer.publish(1, tensors_of(1))
    hold_back(trainer, 1, HELD)
    reading, waiting = stage.begin(rollout.fetch, serve=True), stage.begin(rollout.wait, 9)
    progress.wait("rollout", HELD)
    rollout.close()
    for future in (reading, waiting):
        with pytest.raises(UsageError, match="closed"):
            future.result(SOON_S)


WRONG = [object(), 1.5j, torch.ones(2), torch.tensor(1.5)]  # whatever is expected
CALLS = {name: call for name, call in inspect.getmembers(Client, inspect.isfunction) if not name.startswith("_")}
ARGUMENTS = [(name, each) for name, call in CALLS.items() for each in list(inspect.signature(call).parameters)[1:]]
GIVEN = {"version": 1, "tensors": {"a": ONE}, "layout": "x", "specs": (), "count": 1, "key": ShardKey(1, CHECKPOINT)}


@pytest.mark.parametrize(("name", "argument"), ARGUMENTS)
def test_an_argument_of_the_wrong_type_is_named_by_every_call(the_client, name, argument):
    parameters = inspect.signature(CALLS[name]).parameters
    given = {each: GIVEN[each] for each, kind in list(parameters.items())[1:] if kind.default is kind.empty}
    given |= {"timeout_s": 0.2} if "timeout_s" in parameters else {}
    for wrong in WRONG:
        with pytest.raises(UsageError) as refused:
            CALLS[name](the_client, **{**given, argument: wrong})
        assert {"into": "tensors"}.get(argument, argument) in str(refused.value)
    the_client.versions()


@pytest.fixture(scope="module")
def the_client():
    with (
        start_server(limits=HubLimits(grace_s=0.0)) as hub,
        Client(hub.address, run="r", model="m", replica="a", transports=("tcp",)) as client,
    ):
        yield client


def test_what_belongs_to_one_process_is_neither_pickled_nor_copied(stage, module_hub):
    trainer = stage.client("trainer")
    trainer.publish(1, tensors_of(1))
    fetched = stage.client("reader").fetch(1, timeout_s=SOON_S)
    ours = (trainer, fetched, module_hub, next(iter(fetched.slabs.values())))
    for each in (*ours, Publisher(trainer, rank=0, ranks=1, worker="t", keep=1, timeout_s=1.0)):
        for use in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(UsageError, match=f"a {type(each).__name__} belongs to the process.*make one in each"):
                use(each)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_memory_that_may_only_be_read_is_refused_by_name(stage, tmp_path, transport):
    """It ended the process, or was the source's fault until the deadline."""
    trainer, reader = (stage.client(name, transports=(transport,)) for name in ("trainer", "reader"))
    tensors = {"a": torch.arange(4096.0), "b": torch.arange(4096.0)}
    trainer.publish(1, tensors)
    mine = {"a": torch.zeros(4096)}
    np.zeros(4096, np.float32).tofile(tmp_path / "b")
    for mode in ("r", "r+"):
        with warnings.catch_warnings(action="ignore"):  # numpy's array knows it, the tensor does not
            mine["b"] = torch.from_numpy(np.memmap(tmp_path / "b", np.float32, mode))
        with pytest.raises(UsageError, match="'b' cannot be read into") if mode == "r" else nullcontext():
            reader.replicate(mine, 1, timeout_s=SOON_S)
    assert torch.equal(mine["a"], tensors["a"]) and torch.equal(mine["b"], tensors["b"])


def test_what_the_system_refused_a_worker_is_in_the_hubs_status(stage, monkeypatch):
    """For a while, and while the worker is there: with its next heartbeat."""
    monkeypatch.setattr(resources, "_noted", ("", float("-inf")))
    trainer, reader = stage.client("trainer"), stage.client("reader")
    trainer.publish(1, {"w": torch.ones(1000)})
    monkeypatch.setattr(machine, "free_bytes", lambda root: 1)
    with pytest.raises(ResourceRefused):
        reader.fetch(1)

    def lacks() -> str:
        models = fetch_status(stage.address)["models"]
        return next(
            w["lacks"] for m in models if m["run"] == stage.run for w in m["workers"] if w["worker"] == "reader/0"
        )

    until(lambda: "of host memory are needed" in lacks())
    monkeypatch.setattr(resources, "_noted", ("", float("-inf")))
    until(lambda: not lacks())
