"""One root, one class per remedy.

Every error says what was being done, to which version, with which peer, and what to do about it. Code that catches one
of these decides by class alone; the fields are for users and for logs.

| class            | remedy                                                    |
| ---------------- | --------------------------------------------------------- |
| SourceLost       | retry elsewhere; `Client` does so by itself               |
| CorruptBytes     | the same, and distrust that source                        |
| NotPublished     | wait: it may still appear                                 |
| VersionGone      | abandon this version                                      |
| UsageError       | fix your code or configuration                            |
| ResourceRefused  | give this process more of what is named, and call again   |
| Superseded       | end this process: a newer attempt of its trainer runs     |
| VersionRefused   | publish a version that fits; the old one goes on          |
| ProtocolError    | fix the peer: it speaks another protocol, or is broken    |
| DeadlineExceeded | raise the deadline, or check the peer that is named       |
| HubUnreachable   | start the hub, or fix its address                         |
"""

from __future__ import annotations

from typing import Any


class TensorHubError(Exception):
    """Root of every error this package raises on purpose."""

    def __init__(
        self,
        message: str,
        *,
        version: int | None = None,
        shard: int | None = None,
        peer: str | None = None,
        phase: str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self.message, self.version, self.shard = message, version, shard
        self.peer, self.phase, self.timeout_s = peer, phase, timeout_s
        context = [
            f"{name}={value}"
            for name, value in (
                ("version", version),
                ("shard", shard),
                ("peer", peer),
                ("phase", phase),
                ("timeout_s", None if timeout_s is None else round(timeout_s, 3)),
            )
            if value is not None
        ]
        super().__init__(f"{message} [{', '.join(context)}]" if context else message)

    def within(
        self,
        message: str,
        *,
        version: int | None = None,
        peer: str | None = None,
        phase: str | None = None,
        timeout_s: float | None = None,
    ) -> TensorHubError:
        """Return the same error (class, remedy) with the message and context of an operation that knows more."""
        return type(self)(message, version=version, peer=peer, phase=phase, timeout_s=timeout_s)


class SourceLost(TensorHubError):
    """A source died, froze, withdrew or was disconnected while it was read: read from another."""


class CorruptBytes(SourceLost):
    """Bytes arrived whose digest is not the published one: a broken contract or a broken wire.

    segment: of the source's stream; None: its manifest is not the published one. tensors: those in that segment."""

    def __init__(
        self, message: str, *, segment: int | None = None, tensors: tuple[str, ...] = (), **context: Any
    ) -> None:
        super().__init__(message, **context)
        self.segment, self.tensors = segment, tensors


class NotPublished(TensorHubError):
    """No worker has made this version visible yet."""


class VersionGone(TensorHubError):
    """The version was visible and no longer is: unpublished, withdrawn, or lost with its last holder."""


class Superseded(TensorHubError):
    """This process belongs to an attempt of its trainer that is over: a newer one has begun."""


class UsageError(TensorHubError, ValueError):
    """The caller asked for something that can never work as asked."""


class ResourceRefused(UsageError):
    """The system refuses this process what it needs: threads, open files, memory, a call. The message names the limit,
    and how to raise it. No peer is at fault."""


class VersionRefused(UsageError):
    """This version cannot be installed in this engine; the old one stays."""


class ProtocolError(TensorHubError):
    """A message or a byte stream that no correct peer sends."""


class DeadlineExceeded(TensorHubError, TimeoutError):
    """A wait ended at its deadline; `phase` says which."""


class HubUnreachable(TensorHubError, ConnectionError):
    """No hub answers at the address."""


# The errors with which a hub may refuse a request, by name on the wire. Any other name breaks the protocol.
REFUSALS: dict[str, type[TensorHubError]] = {
    "NotPublished": NotPublished,
    "VersionGone": VersionGone,
    "UsageError": UsageError,
    "Superseded": Superseded,
    "DeadlineExceeded": DeadlineExceeded,
}


def refusal(name: str, message: str, **context: Any) -> TensorHubError:
    """Return the error that a refusal on the wire names: the only place where one becomes the other."""
    return REFUSALS.get(name, ProtocolError)(message, **context)
