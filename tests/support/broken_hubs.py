"""Hubs that break one rule on purpose, for the negative controls of the simulator and of the model.

Each is a context manager: within it, every hub is broken.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import msgspec

from tensorhub_plugins.core.hub import attempts, failure_domains, hub, publishing, selection
from tensorhub_plugins.core.hub.copy_counts import Copies
from tensorhub_plugins.core.hub.following import Following
from tensorhub_plugins.core.hub.hub import Hub
from tensorhub_plugins.core.hub.publishing import Publishing
from tensorhub_plugins.core.hub.reading import Reading
from tensorhub_plugins.core.hub.registry import Registry
from tensorhub_plugins.core.hub.state import History, Pending
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.protocol.directive import NO_DIRECTIVE, Directive

Broken = Callable[[], AbstractContextManager[object]]


def answers(owner: object, name: str, answer: object) -> AbstractContextManager[object]:
    """Patch this method to give always the same answer."""
    return mock.patch.object(owner, name, lambda *_, **__: answer)


@contextmanager
def hears_what_was_given_up() -> Iterator[None]:
    with answers(m.Until, "is_over", False), answers(Pending, "is_overdue", False):
        yield


def forgets_leases() -> AbstractContextManager[object]:
    return answers(Registry, "add_lease", None)


def drops_last_copies() -> AbstractContextManager[object]:
    return answers(Publishing, "_must_stay", False)


def asks_nobody_for_a_copy() -> AbstractContextManager[object]:
    return answers(failure_domains.FailureDomains, "look", None)


def counts_spot_nodes() -> AbstractContextManager[object]:
    return answers(failure_domains, "is_safe", True)


def lets_readers_wait_in_circles() -> AbstractContextManager[object]:
    return answers(selection, "reads_from", False)


def shows_half_versions() -> AbstractContextManager[object]:
    return answers(Copies, "replica_has_all", True)


def takes_a_withdrawn_version_again() -> AbstractContextManager[object]:
    return answers(Publishing, "cannot_be_new", None)


def takes_any_number() -> AbstractContextManager[object]:
    return answers(publishing, "too_far_ahead", None)


def remembers_what_was_withdrawn_as_the_newest() -> AbstractContextManager[object]:
    def broken(self: History) -> None:
        self.newest_visible = max(self.shown, default=0)

    return mock.patch.object(History, "_refresh_newest", broken)


@contextmanager
def never_tells_of_new_versions() -> Iterator[None]:
    with answers(Following, "try_wait", None), answers(Reading, "try_acquire", None):
        yield


def lends_what_is_leaving() -> AbstractContextManager[object]:
    begin = Publishing.begin_unpublish

    def broken(self: Publishing, worker: Any, unpublish: m.Unpublish) -> None:
        begin(self, worker, unpublish)
        for holding in worker.holdings.values():
            holding.unpublishing = None

    return mock.patch.object(Publishing, "begin_unpublish", broken)


def answers_with_an_old_version() -> AbstractContextManager[object]:
    def broken(self: History, at_least: int, without: Any = ()) -> int | None:
        return min((n for n, v in self.versions.items() if v.visible and n >= at_least), default=None)

    return mock.patch.object(History, "newest", broken)


def goes_back() -> AbstractContextManager[object]:
    asked = itertools.count(1)

    def broken(self: History, at_least: int, without: Any = ()) -> int | None:
        number, visible = next(asked), sorted(n for n, v in self.versions.items() if v.visible)
        return None if not visible else visible[0] if number % 7 == 0 else visible[-1]

    return mock.patch.object(History, "newest", broken)


def resolves_latest_for_each_shard() -> AbstractContextManager[object]:
    def broken(self: Reading, pending: Any, acquire: m.Acquire, now: float) -> int:
        worker = pending.worker
        return worker.history.newest(max(acquire.at_least, worker.seen_version)) or 0

    return mock.patch.object(Reading, "resolve_latest", broken)


def follows_the_newest_though_another_is_pinned() -> AbstractContextManager[object]:
    return mock.patch.object(History, "latest", lambda self, at_least: self.newest(at_least))


def shows_what_is_withdrawn() -> AbstractContextManager[object]:
    direct = Following.direct

    def broken(self: Following, history: History, directive: Directive, **welcomed: Any) -> None:
        visible = {n for n, v in history.versions.items() if v.visible}
        direct(self, history, directive, **welcomed)
        for number in visible:
            history.versions[number].visible = True

    return mock.patch.object(Following, "direct", broken)


@contextmanager
def shows_what_is_superseded() -> Iterator[None]:
    direct = Following.direct

    def broken(self: Following, history: History, directive: Directive, **welcomed: Any) -> None:
        visible = {n for n, v in history.versions.items() if v.visible}
        direct(self, history, directive, **welcomed)
        for number in visible - history.withdrawn:
            history.versions[number].visible = True

    with (
        mock.patch.object(Following, "direct", broken),
        mock.patch.object(History, "is_over", lambda self, number: number in self.withdrawn),
    ):
        yield


@contextmanager
def hears_zombies() -> Iterator[None]:
    with (
        mock.patch.object(hub, "over", lambda worker: None),
        answers(Publishing, "is_of_the_past", None),
    ):
        yield


def numbers_every_attempt_alike() -> AbstractContextManager[object]:
    return answers(attempts, "_next_number", 0)


def lends_what_is_withdrawn() -> AbstractContextManager[object]:
    direct = Following.direct

    def broken(self: Following, history: History, directive: Directive, **welcomed: Any) -> None:
        direct(self, history, Directive(directive.serial, directive.pin, (), directive.attempts), **welcomed)

    return mock.patch.object(Following, "direct", broken)


def lets_followers_go_back_by_themselves() -> AbstractContextManager[object]:
    def broken(self: Following, pending: Any, target: m.Target, now: float) -> m.Reply | None:
        newest = pending.worker.history.newest(0, target.refused)
        return None if newest in (None, target.installed) else m.Visible(target.request_id, newest)

    return mock.patch.object(Following, "try_target", broken)


def does_not_listen_to_directives() -> AbstractContextManager[object]:
    hello = Hub._hello

    def broken(self: Hub, session: bytes, said: m.Hello, *more: Any) -> None:
        hello(self, session, msgspec.structs.replace(said, directive=NO_DIRECTIVE), *more)

    return mock.patch.object(Hub, "_hello", broken)


@contextmanager
def believes_late_words() -> Iterator[None]:
    publish = Publishing.publish

    def broken(self: Publishing, worker: Any, *said: Any) -> None:
        worker.withdrawn.clear()
        publish(self, worker, *said)

    with (
        answers(Reading, "agrees", True),
        answers(Hub, "_forget_what_is_not_in", None),
        mock.patch.object(Publishing, "publish", broken),
    ):
        yield
