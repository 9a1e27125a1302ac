"""A session's two names: one to speak with, one to be known by. PURE.

Who knows the identity of a client's connection can speak as that client: ROUTER believes what a connection says of
itself, and all processes of one secret come in with the same key. So the identity is 16 random bytes that only the
client and the server know (CURVE encrypts them on the way), and everybody else, the hub's machine, grants, reports and
logs among them, has a digest of it, from which nothing leads back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

SPARE_MAX = 1024  # names of sessions that are not known as workers, before they are forgotten


def public_name(identity: bytes) -> bytes:
    """By which others know this session: 16 bytes, from which nobody finds its identity."""
    return hashlib.blake2b(identity, digest_size=16, person=b"tensorhub").digest()


class Names:
    """The public name of each identity, and the other way round."""

    def __init__(self) -> None:
        self._public: dict[bytes, bytes] = {}
        self._identities: dict[bytes, bytes] = {}

    def __len__(self) -> int:
        return len(self._public)

    def public(self, identity: bytes, known: Mapping[bytes, object]) -> bytes:
        """The public name of who sends this. known: by the public names that are needed still."""
        name = self._public.get(identity)
        if name is None:
            if len(self._public) >= 2 * len(known) + SPARE_MAX:
                self._public = {i: n for i, n in self._public.items() if n in known}
                self._identities = {n: i for i, n in self._public.items()}
            name = self._public[identity] = public_name(identity)
            self._identities[name] = identity
        return name

    def identity(self, public: bytes) -> bytes | None:
        """Where to send what is for this session; None: it is not known any more."""
        return self._identities.get(public)
