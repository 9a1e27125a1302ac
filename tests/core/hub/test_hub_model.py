"""A naive model beside the hub: Hypothesis finds the sequence in which they differ.

One model, shards and layouts left out (test_hub.py tells those stories), an orderly wire (tests/sim breaks it). The
model is sets and dicts that are recomputed from the start after every step; the hub has to come to the same.
"""

from __future__ import annotations

from collections import Counter

import broken_hubs
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tensorhub_plugins.core.hub.hub import Hub, Received, Send, Tick
from tensorhub_plugins.core.hub.report import validate
from tensorhub_plugins.core.hub.selection import LEASES_PER_SOURCE_MAX
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.protocol.directive import NO_DIRECTIVE
from tensorhub_plugins.core.types import CHECKPOINT, STEPS_AHEAD_MAX, Location, ShardKey, version_of

NAMES = ("a", "b", "c", "d")
LONG_S = 10_000.0


def key(version: int) -> ShardKey:
    return ShardKey(version, CHECKPOINT)


class HubBesideModel(RuleBasedStateMachine):
    @initialize(retain=st.integers(0, 2))
    def start(self, retain: int) -> None:
        self.hub = Hub(b"H" * 16, 0.0)
        self.now = self.hub.limits.grace_s + 1.0
        self.number = 0
        self.answers: dict[tuple[str, int], m.HubMessage] = {}
        # the model
        self.retain = retain
        self.here: set[str] = set()
        self.holders: dict[int, list[str]] = {}
        self.replicas: set[tuple[str, int]] = set()  # what a holder has read, and may read again from itself
        self.kept: set[tuple[str, int]] = set()
        self.visible: set[int] = set()
        self.newest_ever = 0
        self.shown: set[int] = set()
        self.seen: dict[str, int] = {}
        self.leases: dict[tuple[str, int], tuple[int, str]] = {}  # reader, request -> version, source
        self.leaving: dict[tuple[str, int], int] = {}  # worker, version -> request of the unpublish, in order
        self.waiting: dict[tuple[str, int], int] = {}  # worker, request of a wait -> newer than
        self.following: dict[tuple[str, int], tuple[int, int]] = {}  # of a target -> installed, refused
        self.pin = 0
        self.withdrawn: set[int] = set()
        for name in NAMES:
            self.join(name)

    # --- to the hub ---

    def tell(self, name: str, message: m.ClientMessage) -> None:
        self.feed(Received(name.encode() * 16, m.decode_from_client(m.encode(message))))

    def feed(self, event: Received | Tick) -> None:
        for effect in self.hub.handle(event, self.now):
            if isinstance(effect, Send) and hasattr(effect.message, "request_id"):
                self.answers[effect.session.decode()[0], effect.message.request_id] = effect.message

    def request(self) -> int:
        self.number += 1
        return self.number

    # --- the model's own settling ---

    def staying(self, version: int) -> list[str]:
        return [name for name in self.holders.get(version, ()) if (name, version) not in self.leaving]

    def settle(self) -> None:
        """Decide about everything that waits, in order of arrival, as the rules say."""
        for name, version in list(self.leaving):
            request = self.leaving[name, version]
            retained = version in sorted(self.visible, reverse=True)[: self.retain]
            retained |= version == self.pin and version in self.visible
            if retained and not self.staying(version):
                del self.leaving[name, version]
                self.kept.add((name, version))
                self.expect(name, request, m.Unpublished(request, must_retain=True))
            elif (version, name) not in self.leases.values():
                del self.leaving[name, version]
                self.drop(name, version)
                self.expect(name, request, m.Unpublished(request))
        self.visible = {version for version in self.visible if self.staying(version)}
        for (name, request), newer_than in list(self.waiting.items()):
            version = self.latest(name)
            if version > newer_than:
                del self.waiting[name, request]
                self.seen[name] = max(self.seen[name], version)
                self.expect(name, request, m.Visible(request, version))
        for (name, request), (installed, refused) in list(self.following.items()):
            floor = 0 if installed in self.withdrawn else installed
            version = max((v for v in self.visible - {refused} if v >= floor), default=0)
            if self.pin:  # every pin is newer than the refusal, whose serial is 0
                version = self.pin if self.pin in self.visible else 0
            if version not in (0, installed):
                del self.following[name, request]
                self.seen[name] = max(self.seen[name], version)
                self.expect(name, request, m.Visible(request, version))

    def latest(self, name: str) -> int:
        """0: there is none."""
        if self.pin:
            return self.pin if self.pin in self.visible else 0
        floor = 0 if self.seen[name] in self.withdrawn else self.seen[name]
        return max((v for v in self.visible if v >= floor), default=0)

    def drop(self, name: str, version: int) -> None:
        self.holders[version].remove(name)
        self.replicas.discard((name, version))
        self.kept.discard((name, version))

    def expect(self, name: str, request: int, reply: m.HubMessage) -> None:
        assert self.answers.get((name, request)) == reply

    # --- what happens ---

    @precondition(lambda self: len(self.here) < len(NAMES))
    @rule()
    def come_back(self) -> None:
        self.join(min(set(NAMES) - self.here))

    def join(self, name: str) -> None:
        self.here.add(name)
        self.seen[name] = 0
        replica, request = f"replica-{name}", self.request()
        self.tell(name, m.Hello("r", "m", replica, 0, 1, Location(), {}, retain_newest=self.retain, request_id=request))

    @rule(data=st.data(), step=st.integers(1, 2))
    def publish(self, data: st.DataObject, step: int) -> None:
        name, request = data.draw(st.sampled_from(sorted(self.here))), self.request()
        version = self.newest_ever + step
        self.tell(name, m.Publish(request, m.Holding(key(version), b"%016d" % version, 1)))
        self.holders.setdefault(version, []).append(name)
        self.visible.add(version)
        self.shown.add(version)
        self.newest_ever = version
        self.expect(name, request, m.Done(request))
        self.settle()

    @rule(data=st.data(), beyond=st.integers(1, 3), attempt=st.integers(0, 1))
    def publish_too_far_ahead(self, data: st.DataObject, beyond: int, attempt: int) -> None:
        name, request = data.draw(st.sampled_from(sorted(self.here))), self.request()
        version = version_of(attempt, (0 if attempt else self.newest()) + STEPS_AHEAD_MAX + beyond)
        self.tell(name, m.Publish(request, m.Holding(key(version), b"%016d" % version, 1)))
        self.expect_refusal(name, request)

    def newest(self) -> int:
        """Below it a version that is not held is gone: what was withdrawn does not count."""
        return max(self.shown - self.withdrawn, default=0)

    @precondition(lambda self: self.newest_ever)
    @rule(data=st.data(), latest=st.booleans())
    def acquire(self, data: st.DataObject, latest: bool) -> None:
        name, request = data.draw(st.sampled_from(sorted(self.here))), self.request()
        version = 0 if latest else data.draw(st.integers(1, self.newest_ever + 1))
        self.tell(name, m.Acquire(request, version, 0, (CHECKPOINT,), LONG_S))
        wanted = version or self.latest(name)
        taken = Counter(source for (reader, _), (_, source) in self.leases.items() if reader == name)
        held = self.staying(wanted) if wanted in self.visible else []
        others = [s for s in held if s != name]
        sources = [s for s in others if taken[s] < LEASES_PER_SOURCE_MAX]
        sources = sources if others or (name, wanted) not in self.replicas else [s for s in held if s == name]
        answer = self.answers.get((name, request))
        if sources:
            assert isinstance(answer, m.Granted) and answer.version == wanted, answer
            (grant,) = answer.grants
            source = grant.session.decode()[0]
            assert source in sources
            self.leases[name, request] = wanted, source
            self.seen[name] = max(self.seen[name], wanted)
        elif version in self.withdrawn or (version and version not in self.visible and version <= self.newest()):
            assert isinstance(answer, m.Refused) and answer.error == "VersionGone", answer
        else:
            assert answer is None
            self.tell(name, m.Release(request))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), became_source=st.booleans())
    def finish(self, data: st.DataObject, became_source: bool) -> None:
        name, request = data.draw(st.sampled_from(sorted(self.leases)))
        version, _ = self.leases[name, request]
        if became_source and name not in self.holders[version]:
            publish = self.request()
            self.tell(name, m.Publish(publish, m.Holding(key(version), b"%016d" % version, 1, origin="replicated")))
            self.holders[version].append(name)
            self.replicas.add((name, version))
            self.visible |= {version} - self.withdrawn
            self.settle()
        del self.leases[name, request]
        self.tell(name, m.Release(request, 0))
        self.settle()

    @precondition(lambda self: any(self.holders.values()))
    @rule(data=st.data())
    def unpublish(self, data: st.DataObject) -> None:
        held = [(name, version) for version, names in self.holders.items() for name in names]
        name, version = data.draw(st.sampled_from([each for each in held if each not in self.leaving] or held))
        if (name, version) in self.leaving:
            return
        request = self.request()
        self.tell(name, m.Unpublish(request, (key(version),), LONG_S))
        self.kept.discard((name, version))
        self.leaving[name, version] = request
        self.settle()

    @rule(data=st.data(), back=st.integers(0, 2))
    def wait(self, data: st.DataObject, back: int) -> None:
        name, request = data.draw(st.sampled_from(sorted(self.here))), self.request()
        newer_than = max(0, self.newest_ever - back)
        self.tell(name, m.Wait(request, 0, newer_than, LONG_S))
        self.waiting[name, request] = newer_than
        self.settle()

    @rule(data=st.data(), back=st.integers(0, 2), refused=st.integers(0, 2))
    def follow(self, data: st.DataObject, back: int, refused: int) -> None:
        name, request = data.draw(st.sampled_from(sorted(self.here))), self.request()
        installed, never = max(0, self.newest_ever - back), max(1, self.newest_ever - refused)
        self.tell(name, m.Target(request, installed, LONG_S, (never,)))
        self.following[name, request] = installed, never
        self.settle()

    @precondition(lambda self: self.newest_ever)
    @rule(data=st.data(), unpin=st.booleans())
    def direct_to(self, data: st.DataObject, unpin: bool) -> None:
        name, request = data.draw(st.sampled_from(sorted(self.here))), self.request()
        version = 0 if unpin else data.draw(st.integers(1, self.newest_ever + 1))
        self.tell(name, m.Pin(request, version, LONG_S))
        if version and version not in self.visible:
            self.expect_refusal(name, request)
        else:
            self.expect(name, request, m.Done(request))
            self.pin = version
            self.settle()

    @precondition(lambda self: self.newest_ever)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        name, request = data.draw(st.sampled_from(sorted(self.here))), self.request()
        version = data.draw(st.integers(1, self.newest_ever + 1))
        self.tell(name, m.Withdraw(request, version, LONG_S))
        if version > self.newest() and version not in self.withdrawn:
            self.expect_refusal(name, request)
            return
        self.expect(name, request, m.Done(request))
        self.withdrawn.add(version)
        self.visible.discard(version)
        self.pin = 0 if self.pin == version else self.pin
        self.settle()

    @precondition(lambda self: self.withdrawn)
    @rule(data=st.data())
    def publish_what_was_withdrawn(self, data: st.DataObject) -> None:
        version = data.draw(st.sampled_from(sorted(self.withdrawn)))
        for name in sorted(self.here - set(self.holders.get(version, ()))):
            request = self.request()
            self.tell(name, m.Publish(request, m.Holding(key(version), b"%016d" % version, 1)))
            self.expect_refusal(name, request)

    def expect_refusal(self, name: str, request: int) -> None:
        answer = self.answers.get((name, request))
        assert isinstance(answer, m.Refused) and answer.error == "UsageError", answer

    @precondition(lambda self: len(self.here) == len(NAMES) and any(self.holders.values()))
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.here)))
        self.tell(name, m.Bye())
        self.here.remove(name)
        self.leases = {k: lease for k, lease in self.leases.items() if k[0] != name and lease[1] != name}
        self.leaving = {k: request for k, request in self.leaving.items() if k[0] != name}
        self.waiting = {k: newer for k, newer in self.waiting.items() if k[0] != name}
        self.following = {k: what for k, what in self.following.items() if k[0] != name}
        for version in self.holders:
            if name in self.holders[version]:
                self.drop(name, version)
        self.settle()

    @rule()
    def time_passes(self) -> None:
        self.now += 1.0
        for name in self.here:
            leases = {request: 1 for reader, request in self.leases if reader == name}
            pending = [request for worker, request in (*self.waiting, *self.following) if worker == name]
            pending += [request for (worker, _), request in self.leaving.items() if worker == name]
            held = m.holdings_checksum((key(v), True) for v, names in self.holders.items() if name in names)
            self.tell(name, m.Heartbeat(self.hub.session, self.number, tuple(sorted(pending)), leases, held))
        self.feed(Tick())

    # --- what must be the same ---

    @invariant()
    def the_hub_agrees(self) -> None:
        validate(self.hub.registry)
        history = self.hub.registry.histories.get(("r", "m"))
        versions = history.versions if history else {}
        directive = history.directive if history else NO_DIRECTIVE
        assert (directive.pin, set(directive.withdrawn)) == (self.pin, self.withdrawn)
        assert {n for n, v in versions.items() if v.visible} == self.visible
        holders = {n: sorted(s.decode()[0] for s in v.holders(key(n))) for n, v in versions.items()}
        assert {n: h for n, h in holders.items() if h} == {n: sorted(h) for n, h in self.holders.items() if h}
        leases = {
            (session.decode()[0], request): (lease.version, lease.sources[0].decode()[0])
            for session, worker in self.hub.registry.workers.items()
            for request, lease in worker.leases.items()
        }
        assert leases == self.leases
        holdings = (h for worker in self.hub.registry.workers.values() for h in worker.holdings.values())
        kept = {(h.worker.session.decode()[0], h.key.version) for h in holdings if h.must_retain}
        assert kept == self.kept


TestHubBesideModel = pytest.mark.slow(pytest.mark.timeout(600)(HubBesideModel.TestCase))
TestHubBesideModel.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


# --- negative controls ---


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "broken",
    [
        broken_hubs.forgets_leases,
        broken_hubs.drops_last_copies,
        broken_hubs.lends_what_is_leaving,
        broken_hubs.answers_with_an_old_version,
        broken_hubs.follows_the_newest_though_another_is_pinned,
        broken_hubs.shows_what_is_withdrawn,
        broken_hubs.lets_followers_go_back_by_themselves,
        broken_hubs.takes_a_withdrawn_version_again,
        broken_hubs.takes_any_number,
        broken_hubs.remembers_what_was_withdrawn_as_the_newest,
    ],
)
def test_the_model_notices_a_broken_hub(broken: broken_hubs.Broken) -> None:
    # As many as it takes: what is drawn depends on constants in the modules that are loaded.
    quick = settings(max_examples=3000, stateful_step_count=40, deadline=None, phases=[Phase.generate])
    with broken(), pytest.raises(AssertionError):
        run_state_machine_as_test(HubBesideModel, settings=quick)
