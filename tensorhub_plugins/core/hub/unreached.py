"""Sources that readers cannot connect to: reported in the log, to the sources themselves and in the status. PURE."""

from __future__ import annotations

from tensorhub_plugins.core.hub.outbox import Outbox
from tensorhub_plugins.core.hub.state import History, Worker
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.protocol import reach

SOURCES_MAX = 64  # of one reader: its client reports no more


def hear(reader: Worker, sources: tuple[bytes, ...], outbox: Outbox, now: float) -> None:
    """Record which sources a reader cannot connect to. Warn once of each that is alive, as it was heard since, in the
    log and on its own host."""
    if not sources and not reader.unreached:
        return
    known = [session for session in sources if session in reader.history.workers][:SOURCES_MAX]
    reader.unreached = {session: reader.unreached.get(session, now) for session in known}
    for session, since in reader.unreached.items():
        source = reader.history.workers[session]
        if source.is_said_unreached or source.last_heard <= since:
            continue
        source.is_said_unreached = True
        said = summary_of(source, [f"{reader.name} on {reader.hello.location.host or 'another host'}"])
        outbox.warn(said)
        outbox.send(session, m.Alive(unreached=said))


def summary_of(source: Worker, readers: list[str]) -> str:
    """Return that these readers cannot connect to this source, for people; "" if there are none."""
    endpoints = reach.at_all_hosts(source.hello.endpoints, source.hello.hosts)
    return reach.unreached(source.name, endpoints, readers) if readers else ""


def readers_of(history: History) -> dict[bytes, list[str]]:
    """Return the readers that cannot connect to a source, by its session."""
    found: dict[bytes, list[str]] = {}
    for worker in history.workers.values():
        for session in worker.unreached:
            found.setdefault(session, []).append(worker.name)
    return found
