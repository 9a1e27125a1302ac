"""The trainer side against a real hub: ranks that share a model, snapshots, versions that go."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext

import pytest
import torch
from client_stage import FIRST_HUB, SOON_S, holders, until
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_plugins.core import (
    CHECKPOINT,
    Client,
    Location,
    NotPublished,
    ShardKey,
    UsageError,
    spec_of,
    start_server,
    version_of,
)
from tensorhub_plugins.core.cli import fetch_status
from tensorhub_plugins.core.client.parts import Ownership
from tensorhub_plugins.core.client.publisher import Publisher
from tensorhub_plugins.core.errors import HubUnreachable, ResourceRefused
from tensorhub_plugins.core.threads import Thread


def weights(seed, dtype=torch.float32, shapes=((64, 32), (7,), (128, 64), (), (3, 3, 3))):
    generator = torch.Generator().manual_seed(seed)
    return {f"layer.{i}": torch.randn(shape, generator=generator).to(dtype) for i, shape in enumerate(shapes)}


def publisher(address, rank=0, ranks=1, keep=2, location=None, **options):
    shard = {"shard": rank, "shard_count": ranks}
    client = Client(address, run="r", model="actor", replica="trainer", location=location, **shard)
    return Publisher(client, rank=rank, ranks=ranks, worker=f"trainer/{rank}", keep=keep, timeout_s=10, **options)


def specs(model):
    return [spec_of(name, tensor) for name, tensor in model.items()]


def read(address, version):
    with Client(address, run="r", model="actor", replica="reader") as client:
        fetched = client.fetch(version, (CHECKPOINT,), timeout_s=10)
        return {name: tensor.clone() for name, tensor in fetched.tensors().items()}, fetched.report


def assert_equal(a, b):
    assert sorted(a) == sorted(b)
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"keep": 0}, "keep=0: how many versions"),
        ({"keep": "2"}, "keep='2': how many versions"),
        ({"rank": 1}, "shard 1 of 1: shards count from 0"),
        ({"ranks": 0}, "shard 0 of 0: shards count from 0"),
        ({"slices": "2"}, "slices='2': give the tensor parallel size"),
    ],
)
def test_a_publisher_that_cannot_work_is_refused_before_anything_is_published(options, words):
    with pytest.raises(UsageError, match=words):
        Publisher(None, **{"rank": 0, "ranks": 1, "worker": "trainer/0", "keep": 1, "timeout_s": 10, **options})


@pytest.mark.parametrize("given", [torch.tensor(1), 5, [5], [torch.tensor(1)], {"ab": 1}], ids=repr)
def test_what_are_no_weights_is_refused_and_the_next_are_published(address, given):
    with closing(publisher(address)) as trainer, trainer.client:
        for call, words in (
            (lambda: trainer.publish(1, given), "weights.*: give pairs of a name and a tensor"),
            (lambda: trainer.publish_parts(1, given), "held.*: give every tensor of the model as a Held"),
            (lambda: trainer.prepare(given), "held.*: give every tensor of the model as a Held"),
        ):
            with pytest.raises(UsageError, match=words):
                call()
        trainer.publish(1, weights(1).items())
        assert trainer.client.serving()


@pytest.mark.parametrize("is_known", [False, True], ids=["as it comes", "known beforehand"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_ranks_each_serve_half(address, dtype, is_known):
    known = specs(weights(0, dtype)) if is_known else ()
    ranks = [publisher(address, rank, 2, model=known) for rank in range(2)]
    for step in (1, 2, 3):
        model = weights(step, dtype)
        for rank in ranks:
            rank.publish(step, iter(model.items()))
        tensors, report = read(address, step)
        assert_equal(tensors, model)
        assert sorted(report.sources) == ["trainer/0", "trainer/1"]
        assert max(report.sources.values()) <= 0.9 * report.size_bytes
    for rank in ranks:
        rank.close()


def test_a_version_of_which_a_rank_is_missing_is_not_visible(address):
    ranks = [publisher(address, rank, 2) for rank in range(2)]
    ranks[0].publish(1, iter(weights(1).items()))
    with Client(address, run="r", model="actor", replica="reader") as client, pytest.raises(NotPublished):
        client.wait(1, timeout_s=0.3)
    ranks[1].publish(1, iter(weights(1).items()))
    assert_equal(read(address, 1)[0], weights(1))
    for rank in ranks:
        rank.close()


def test_the_snapshot_is_the_weights_as_they_were(address):
    rank = publisher(address)
    model = weights(1)
    before = {name: tensor.clone() for name, tensor in model.items()}
    for version in (1, 2):  # staged the first time, straight into the slab from then on
        rank.publish(version, iter(model.items()))
        for tensor in model.values():
            tensor.add_(1)  # the next optimizer step
        assert_equal(read(address, version)[0], before)
        before = {name: tensor.clone() for name, tensor in model.items()}
    rank.close()


def test_fp32_masters_are_cast_when_asked_to(address):
    rank = publisher(address, dtype=torch.bfloat16)
    model = weights(1) | {"steps": torch.tensor([3], dtype=torch.int64)}
    rank.publish(1, iter(model.items()))
    tensors, _ = read(address, 1)
    assert_equal(tensors, {n: t.bfloat16() if t.is_floating_point() else t for n, t in model.items()})
    rank.close()


OTHER = {
    "missing": (lambda model: model.pop("layer.2"), r"1 missing: 'layer.2'\. "),
    "new": (lambda model: model.update(extra=torch.zeros(3)), r"1 new: 'extra'\. "),
    "shape": (
        lambda model: model.update({"layer.1": torch.zeros(9)}),
        r"1 changed: 'layer.1' \(expected float32\[7\], given float32\[9\]\)\. ",
    ),
    "dtype": (
        lambda model: model.update({"layer.1": torch.zeros(7, dtype=torch.int32)}),
        r"1 changed: 'layer.1' \(expected float32\[7\], given int32\[7\]\)\. ",
    ),
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("is_known", [False, True], ids=["as it comes", "known beforehand"])
@pytest.mark.parametrize("other", OTHER)
def test_other_tensors_than_before_are_refused_on_every_rank(address, other, is_known, ranks):
    change, words = OTHER[other]
    model = weights(1)
    trainers = [publisher(address, rank, ranks, model=specs(model) if is_known else ()) for rank in range(ranks)]
    versions = [1, 2] if is_known else [2]
    if not is_known:
        for rank in trainers:
            rank.publish(1, iter(model.items()))
    for version in versions:  # what is known beforehand holds for the first version too
        changed = weights(2)
        change(changed)
        for rank in trainers:
            seen = []
            with pytest.raises(UsageError, match=words + "Nothing was published.* take a new run or model name"):
                rank.publish(version, ((seen.append(name) or name, tensor) for name, tensor in changed.items()))
            assert seen == list(changed)  # each step is a collective: no rank leaves early
            assert all(key.version < version for key in rank.client.serving())
        for rank in trainers:  # the control: the version itself is as good as before
            rank.publish(version, iter(weights(version).items()))
        assert_equal(read(address, version)[0], weights(version))
    for rank in trainers:
        rank.close()


def test_another_split_between_the_ranks_is_no_other_model(address):
    trainers = [publisher(address, rank, 2) for rank in range(2)]
    shares = []  # of the first rank
    for version in (1, 2, 3):
        model = dict(sorted(weights(version).items(), reverse=version == 2))
        for rank in trainers:
            rank.publish(version, iter(model.items()))
        offer = trainers[0].client.find(ShardKey(version, CHECKPOINT, 0, 2))
        shares.append([spec.name for spec in offer.manifest.tensors])
        assert_equal(read(address, version)[0], model)
    assert shares[0] == shares[2] != shares[1]
    for rank in trainers:
        rank.close()


def test_old_versions_go_and_their_memory_is_used_again(address):
    rank = publisher(address, keep=2)
    gone = threading.Event()
    unpublish = rank.client.unpublish
    rank.client.unpublish = lambda *a, **k: (unpublish(*a, **k), gone.set())
    for version in (1, 2, 3):
        rank.publish(version, iter(weights(version).items()))
    assert gone.wait(10)
    visible = [info.version for info in rank.client.versions() if any(info.layouts.values())]
    assert visible == [2, 3]
    assert_equal(read(address, 2)[0], weights(2))
    rank.close()


def test_a_version_that_is_over_while_the_hub_is_away_goes_when_it_is_back():
    """It may be the last copy meanwhile, and the next one is published nevertheless."""
    hub, asked = start_server(), threading.Event()
    trainer = publisher(hub.address, keep=1)
    wait = trainer.client.wait

    def wait_in_vain(**question):
        trainer.client.wait = wait
        hub.close()
        try:
            return wait(**{**question, "timeout_s": 0.2})
        finally:
            asked.set()

    trainer.client.wait = wait_in_vain
    for version in (1, 2):
        trainer.publish(version, weights(version).items())
    assert asked.wait(SOON_S)
    with start_server(hub.address, limits=FIRST_HUB), closing(trainer):
        until(lambda: trainer.client.serving() == [ShardKey(2, CHECKPOINT)])


def test_what_fails_with_one_version_that_is_over_keeps_no_later_one(address, monkeypatch):
    with closing(publisher(address, keep=1)) as trainer:
        make_ahead = trainer.client.changes.make_ahead

        def fails(*asked):
            monkeypatch.setattr(trainer.client.changes, "make_ahead", make_ahead)
            raise RuntimeError("a bug of ours")

        monkeypatch.setattr(trainer.client.changes, "make_ahead", fails)
        for version in (1, 2, 3):
            trainer.publish(version, weights(version).items())
        until(lambda: ShardKey(2, CHECKPOINT) not in trainer.client.serving())


def test_a_version_is_published_though_no_thread_withdraws_the_one_before(address, monkeypatch, caplog):
    """Else it would be visible though its publish has failed, and no other weights could have its number."""
    start = Thread.start

    def refused(thread):
        if thread.name == "tensorhub-unpublish":
            raise RuntimeError("can't start new thread")
        start(thread)

    with closing(publisher(address, keep=1)) as trainer:
        trainer.publish(1, weights(1).items())
        with monkeypatch.context() as patch:
            patch.setattr(Thread, "start", refused)
            trainer.publish(2, weights(2).items())
        assert "the version before stays on offer until the next one" in caplog.text and "threads" in caplog.text
        assert read(address, 2)[1].version == 2
        trainer.publish(3, weights(3).items())
        until(lambda: {key.version for key in trainer.client.serving()} == {3})


def test_the_same_step_twice(address):
    rank = publisher(address)
    rank.publish(1, iter(weights(1).items()))
    assert rank.publish(1, iter(weights(1).items())) == {}  # nothing changed
    with pytest.raises(UsageError, match="other weights were given for a version that is already published"):
        rank.publish(1, iter(weights(2).items()))
    assert_equal(read(address, 1)[0], weights(1))
    rank.close()


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("fails", [False, True], ids=["is published", "is refused"])
def test_of_two_threads_that_publish_at_once_none_loses_a_version_without_an_error(address, in_background, fails):
    with closing(publisher(address, in_background=in_background)) as trainer, ThreadPoolExecutor(1) as other:
        trainer.publish(1, weights(1).items())

        def meanwhile():
            yield from list(weights(2).items())[:2]
            given = {**weights(3), "more": torch.ones(1)} if fails else weights(3)
            with pytest.raises(UsageError, match="'more'") if fails else nullcontext():
                other.submit(lambda: (trainer.publish(3, given.items()), trainer.settle())).result(SOON_S)
            yield from list(weights(2).items())[2:]

        with pytest.raises(UsageError, match="another thread has begun to publish meanwhile"):
            trainer.publish(2, meanwhile())
        trainer.publish(4, weights(4).items())  # the control: one after the other
        trainer.settle()
        shown = [info.version for info in trainer.client.versions() if info.visible]
        assert set(shown) - {1} == ({4} if fails else {3, 4})


def test_all_ranks_exhaust_the_generator(address):
    """Every step of it is a collective: a rank that stops early hangs the others."""
    ranks = [publisher(address, rank, 3) for rank in range(3)]
    for rank in ranks:
        seen = []
        rank.publish(1, ((name, seen.append(name) or tensor) for name, tensor in weights(1).items()))
        assert seen == list(weights(1))
        rank.close()


def test_a_tensor_that_does_not_come_is_an_error_that_names_it(address):
    model = weights(1)
    rank = publisher(address, model=specs(model))
    gone = model.pop("layer.2")
    with pytest.raises(UsageError, match="'layer.2'"):
        rank.publish(1, iter(model.items()))
    rank.publish(1, iter((model | {"layer.2": gone}).items()))
    assert_equal(read(address, 1)[0], model | {"layer.2": gone})
    rank.close()


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        (3, torch.ones(2), "the name 3 of a tensor is a int"),
        ("\udc80", torch.ones(2), "half a surrogate pair"),
        ("a", None, "'a' is a NoneType, not a tensor"),
    ],
)
def test_what_is_no_named_tensor_is_refused(address, name, tensor, words):
    rank = publisher(address)
    with pytest.raises(UsageError, match=words):
        rank.publish(1, iter([("first", torch.ones(2)), (name, tensor)]))
    assert rank.client.serving() == []
    rank.publish(1, iter([("first", torch.ones(2))]))
    rank.close()


@pytest.mark.parametrize("is_known", [False, True], ids=["as it comes", "known beforehand"])
def test_a_name_that_comes_twice_is_refused_on_every_rank_at_the_end(address, is_known):
    """Readers would have whichever came last."""
    model = weights(1)
    ranks = [publisher(address, rank, 2, model=specs(model) if is_known else ()) for rank in range(2)]
    for rank in ranks:
        rest = iter([*model.items(), ("layer.0", model["layer.0"] + 1), ("last", torch.ones(2))])
        with pytest.raises(UsageError, match="tensor 'layer.0' is there twice, and nothing was published"):
            rank.publish(1, rest)
        assert next(rest, None) is None and rank.client.serving() == []
    for rank in ranks:
        rank.publish(1, iter(model.items()))
    assert_equal(read(address, 1)[0], model)
    for rank in ranks:
        rank.close()


def test_a_model_known_beforehand_may_be_strided(address):
    model = {"turned": torch.arange(12.0).view(3, 4).t(), "plain": torch.ones(3)}
    rank = publisher(address, model=specs(model))
    for version in (1, 2):
        rank.publish(version, iter(model.items()))
        assert_equal(read(address, version)[0], model)
    rank.close()


@given(st.lists(st.integers(0, 1 << 30), max_size=200), st.integers(1, 9))
def test_ranks_agree_and_none_is_the_funnel(sizes, ranks):
    decisions = []
    for _ in range(2):  # two ranks, each with its own copy of the rule
        rule = Ownership(ranks)
        decisions.append([rule.give(size) for size in sizes])
    assert decisions[0] == decisions[1]
    load = [sum(s for s, owner in zip(sizes, decisions[0], strict=True) if owner == r) for r in range(ranks)]
    assert max(load) - min(load) <= max(sizes, default=0)  # never more apart than one tensor


def test_ranks_that_resume_publish_a_step_again(address):
    """All ranks begin together; what was published from their first step on is over."""
    with Client(address, run="r", model="actor", replica="copy") as copy:
        for life, steps in enumerate(((1, 2, 3), (3, 4))):
            ranks = [publisher(address, rank, 2, begins=True) for rank in range(2)]
            for step in steps:
                model = weights(10 * life + step)
                with ThreadPoolExecutor(2) as threads:
                    list(threads.map(lambda rank: rank.publish(step, iter(model.items())), ranks))  # noqa: B023
                assert [rank.attempt for rank in ranks] == [life, life]
                assert_equal(read(address, version_of(life, step))[0], model)
            copy.fetch(serve=True)
            for rank in ranks:
                rank.close()
        assert [info.version for info in copy.versions() if info.visible] == [version_of(1, 4)]


@pytest.mark.parametrize("step", [0, -1, True])
def test_a_first_step_that_is_no_version_is_refused_and_begins_nothing(address, step):
    one = publisher(address, 0, 1, begins=True)
    with pytest.raises(UsageError, match="^step must be a positive integer"):
        one.publish(step, iter(weights(1).items()))
    one.publish(1, iter(weights(1).items()))
    assert one.attempt == 0
    one.close()


@pytest.mark.slow
@pytest.mark.parametrize("retain", [(2, "rack"), None])
def test_a_trainer_asks_for_copies_that_survive_its_rack(address, retain):
    """The control: who asks for nothing has none made."""
    first, second = (
        publisher(address, rank, 2, begins=True, retain=retain, location=Location("dc", "a", f"host{rank}"))
        for rank in range(2)
    )
    idle = Client(address, run="r", model="actor", replica="idle", location=Location("dc", "b", "host"))
    operator = Client(address, run="r", model="actor", replica="operator", location=Location("dc", "a", "host1"))
    with ThreadPoolExecutor(2) as threads, first.client, second.client, idle, operator:
        list(threads.map(lambda rank: rank.publish(1, iter(weights(1).items())), (first, second)))
        model = fetch_status(address)["models"][0]
        assert (model["retain_domains"], model["retain_across"]) == (retain or (1, "host"))
        if retain:
            until(lambda: "idle/0" in holders(operator, 1))
        for rank in (first, second):
            rank.close()
        if retain:
            assert_equal(operator.fetch(1).tensors(), weights(1))
        else:
            assert not idle.serving()


def test_copies_are_asked_for_until_the_hub_has_heard_it(address, monkeypatch):
    """In the attempt that was begun, and once."""
    asked = []
    with closing(publisher(address, begins=True, retain=(2, "rack"))) as trainer:

        def unheard_at_first(**wanted):
            asked.append((wanted["domains"], wanted["across"], trainer.attempt))
            if len(asked) == 1:
                raise HubUnreachable("the hub does not answer")

        monkeypatch.setattr(trainer.client, "retain", unheard_at_first)
        with pytest.raises(HubUnreachable):
            trainer.publish(1, weights(1).items())
        for version in (1, 2):
            trainer.publish(version, weights(version).items())
        trainer.begin(2)
        trainer.publish(3, weights(3).items())
        assert asked == [(2, "rack", attempt) for attempt in (0, 0, 1)]


def test_what_a_checkpoint_has_is_retained_within_the_time_of_its_publish(address, monkeypatch):
    with closing(publisher(address, retain=(2, "rack"))) as trainer:
        given = []
        trainer.publish(1, weights(1).items())
        trainer.retain_version_of(trainer._sent.root().hex())
        monkeypatch.setattr(trainer.client, "retain", lambda **asked: given.append(asked["timeout_s"]))
        trainer.timeout_s = 3.0
        trainer.publish(2, weights(1).items())
        assert len(given) == 1 and given[0] <= 3.0


@pytest.mark.parametrize(("is_known", "counts"), [(True, [2]), (False, [1])], ids=["announced", "found out"])
@pytest.mark.parametrize("refuses", [False, True], ids=["there is room", "there is none"])
def test_memory_is_made_before_it_is_needed_once(address, monkeypatch, is_known, counts, refuses):
    """For the first version and the next, where the layout is known; else for the next, when the first is on offer."""
    reserved, model, reserve = [], weights(1), Client.reserve

    def reserving(client, wanted, count):
        reserved.append((count, len(client.serving())))
        if refuses:
            raise ResourceRefused("no memory")
        reserve(client, wanted, count)

    monkeypatch.setattr(Client, "reserve", reserving)
    with closing(publisher(address, keep=1, model=specs(model) if is_known else ())) as trainer:
        for version in (1, 2, 3):
            trainer.publish(version, weights(version).items())
        assert reserved == [(count, not is_known) for count in counts]
        assert_equal(read(address, 3)[0], weights(3))
