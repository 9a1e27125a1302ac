"""A session's two names: its secret identity, and its public name. PURE.

A process that knows the identity of a client's connection can speak as that client: ROUTER believes the identity that a
connection gives, and all processes of one secret connect with the same key. So the identity is 16 random bytes that
only the client and the server know (CURVE encrypts them on the way), and all else, among it the hub's state machine,
grants, reports and logs, has a digest of it, which cannot be inverted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

SPARE_MAX = 1024  # names of sessions that are not known as workers, before they are forgotten


def public_name(identity: bytes) -> bytes:
    """Return the name by which others know this session: 16 bytes, from which its identity cannot be derived."""
    return hashlib.blake2b(identity, digest_size=16, person=b"tensorhub").digest()


class Names:
    """The public name of each identity, and the identity of each public name."""

    def __init__(self) -> None:
        self._public: dict[bytes, bytes] = {}
        self._identities: dict[bytes, bytes] = {}

    def __len__(self) -> int:
        return len(self._public)

    def public(self, identity: bytes, known: Mapping[bytes, object]) -> bytes:
        """Return the public name of this sender. known: a mapping by the public names that are still needed."""
        name = self._public.get(identity)
        if name is None:
            if len(self._public) >= 2 * len(known) + SPARE_MAX:
                self._public = {i: n for i, n in self._public.items() if n in known}
                self._identities = {n: i for i, n in self._public.items()}
            name = self._public[identity] = public_name(identity)
            self._identities[name] = identity
        return name

    def identity(self, public: bytes) -> bytes | None:
        """Return the identity to send to for this session; None: it is not known any more."""
        return self._identities.get(public)
