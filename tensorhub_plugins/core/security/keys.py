"""Key derivation: one secret gives the keys of a hub and of its clients. No clock, randomness or file: see secret.py.

    secret -- HKDF-SHA256 --> the hub's X25519 key      clients know its public half: no other process can be the hub
                              one X25519 key a role     the hub admits these three public keys and no other
                              the lease key             the hub signs leases with it, sources check them (leases.py)

The holder of the secret is a publisher. A reader's or an observer's key is made from it (`limited`, or `tensorhub
keygen --role`), and neither the secret nor another role's key can be derived from it. A reader's key contains the lease
key, because it serves what it has read to other readers.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from typing import cast, get_args

import zmq
from zmq.utils import z85

from tensorhub_plugins.core.errors import UsageError
from tensorhub_plugins.core.types import Role

KEY_SIZE_BYTES = 32
SALT = b"tensorhub_plugins 1"
TEXT_LENGTH_MIN = 32  # of a secret that a user has chosen: 128 bits are 32 hexadecimal digits
TEXT_LENGTH_MAX = 4096
SECRET_MARK = "tensorhub-secret:"
ROLE_MARKS: dict[str, Role] = {"tensorhub-reader:": "reader", "tensorhub-observer:": "observer"}


class Keys:
    """The keys of one process. role: what it may do. lease_key: b"": it may neither read nor serve.

    Its representation, in a log or a traceback, contains no key."""

    def __init__(self, role: Role, own: bytes, hub_public: bytes, lease_key: bytes, secret: bytes = b"") -> None:
        """Take the X25519 key of this role (own), the public half of the hub's, and for publishers the secret."""
        self.role, self.lease_key, self._own = role, lease_key, own
        self._hub_public, self._secret = hub_public, secret

    def __repr__(self) -> str:
        return f"Keys(role={self.role!r})"

    @staticmethod
    def of(secret: bytes) -> Keys:
        """Return the keys of a publisher."""
        return Keys(
            "publisher",
            _derive(secret, "client publisher"),
            public_of(_derive(secret, "hub")),
            _derive(secret, "lease"),
            secret,
        )

    @staticmethod
    def parse(text: str) -> Keys:
        """Return the keys given as text: a secret or a role's key. Raise UsageError, which does not repeat it."""
        text = text.strip()
        if text.startswith(SECRET_MARK):
            return Keys.of(_decoded(text.removeprefix(SECRET_MARK), 1))
        for mark, role in ROLE_MARKS.items():
            if text.startswith(mark):
                count = 3 if role == "reader" else 2
                content = _decoded(text.removeprefix(mark), count)
                own, hub_public, lease_key = (content[at : at + KEY_SIZE_BYTES] for at in (0, 32, 64))
                return Keys(role, own, hub_public, lease_key)
        if not TEXT_LENGTH_MIN <= len(text) <= TEXT_LENGTH_MAX or not text.isprintable():
            raise UsageError(
                f"this is no secret: make one with `tensorhub keygen`, or use a random text of {TEXT_LENGTH_MIN} to "
                f"{TEXT_LENGTH_MAX} characters in one line"
            )
        return Keys.of(text.encode())

    def text(self) -> str:
        """Return the text, one line, that `parse` takes."""
        if self._secret:
            made_by_us = len(self._secret) == KEY_SIZE_BYTES
            return SECRET_MARK + _encoded(self._secret) if made_by_us else self._secret.decode()
        mark = next(mark for mark, role in ROLE_MARKS.items() if role == self.role)
        return mark + _encoded(self._own + self._hub_public + self.lease_key)

    def limited(self, role: Role) -> Keys:
        """Return the key of another role. Raise UsageError for one that cannot be made from this one."""
        if role == self.role:
            return self
        if role not in get_args(Role):
            raise UsageError(f"there is no role {role!r}: choose one of {', '.join(get_args(Role))}")
        lease_key = self.lease_key if role == "reader" else b""
        return Keys(role, _derive(self._needed(), f"client {role}"), self._hub_public, lease_key)

    # --- CURVE, for curve.py: keys in Z85, as ZeroMQ takes them ---

    def of_hub(self) -> bytes:
        """Return the hub's secret key. Raise UsageError in a process that has only a role's key."""
        return z85.encode(_derive(self._needed(), "hub"))

    def hub_public(self) -> bytes:
        """Return the hub's public key."""
        return z85.encode(self._hub_public)

    def own(self) -> tuple[bytes, bytes]:
        """Return the (public, secret) key of this client."""
        return z85.encode(public_of(self._own)), z85.encode(self._own)

    def admitted(self) -> dict[bytes, Role]:
        """Return the public keys, raw, of the clients that the hub admits."""
        roles = cast(tuple[Role, ...], get_args(Role))
        return {public_of(_derive(self._needed(), f"client {role}")): role for role in roles}

    def _needed(self) -> bytes:
        if not self._secret:
            raise UsageError(f"this needs the run's secret, and what was given is the key of a {self.role}")
        return self._secret


def public_of(private: bytes) -> bytes:
    """Return the public half of an X25519 key."""
    return z85.decode(zmq.curve_public(z85.encode(private)))


def _derive(secret: bytes, label: str) -> bytes:
    """Return one block of HKDF-SHA256 (RFC 5869)."""
    extracted = hmac.digest(SALT, secret, hashlib.sha256)
    return hmac.digest(extracted, label.encode() + b"\x01", hashlib.sha256)


def _encoded(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).decode().rstrip("=")


def _decoded(text: str, count: int) -> bytes:
    try:
        content = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (ValueError, binascii.Error):
        content = b""
    if len(content) != count * KEY_SIZE_BYTES:
        raise UsageError("this secret is damaged: copy all of the line that `tensorhub keygen` wrote, and no more")
    return content
