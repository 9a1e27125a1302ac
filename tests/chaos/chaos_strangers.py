"""Who means harm: a worker that lies about bytes, and somebody who has no right to be here."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from typing import Any

import zmq
from chaos_crew import RUN, Post, Rollout

from tensorhub_plugins.core import Client, TensorHubError
from tensorhub_plugins.core import transports as transport_names
from tensorhub_plugins.core.protocol import messages
from tensorhub_plugins.core.security.keys import Keys
from tensorhub_plugins.core.transports.tcp import TcpTransport

STRIKE_S = 1.5  # one strike
MOODS = ("proxy", "proxy", "proxy", "rubbish", "silence", "end")


class Liar(Rollout):
    """Reads like any other, and serves over a wire that turns bits, breaks off, or says nothing at all."""

    def __init__(self, post: Post) -> None:
        LyingTcp.rng = random.Random(post.seed)
        transport_names.MODULES["tcp"] = ("chaos_strangers", "LyingTcp")
        super().__init__(post)


class LyingTcp(TcpTransport):
    """tcp, with somebody in the middle of all that is served."""

    rng = random.Random(0)

    def serve(self, shelf: Any) -> str:
        honest = super().serve(shelf)
        host, _, port = honest.removeprefix("tcp://").rpartition(":")
        listener = socket.create_server((host, 0))
        threading.Thread(target=self._lie, args=(listener, (host, int(port))), daemon=True).start()
        return honest.replace(port, str(listener.getsockname()[1]))

    def _lie(self, listener: socket.socket, honest: tuple[str, int]) -> None:
        while True:
            victim, _ = listener.accept()
            mood, seed = self.rng.choice(MOODS), self.rng.random()
            threading.Thread(target=_treat, args=(victim, honest, mood, random.Random(seed)), daemon=True).start()


def _treat(victim: socket.socket, honest: tuple[str, int], mood: str, rng: random.Random) -> None:
    with contextlib.suppress(OSError), victim:
        if mood == "rubbish":
            victim.recv(12)
            victim.sendall(rng.randbytes(1 << 16))
        elif mood == "silence":
            time.sleep(30)
        elif mood == "proxy":
            with socket.create_connection(honest) as source:
                threading.Thread(target=_copy, args=(victim, source, None), daemon=True).start()
                _copy(source, victim, rng)


def _copy(one: socket.socket, other: socket.socket, rng: random.Random | None) -> None:
    """Until either ends. rng: turn a bit in every hundredth piece, and break off in every thousandth."""
    with contextlib.suppress(OSError):
        while data := bytearray(one.recv(1 << 16)):
            if rng is not None and rng.random() < 0.01:
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            if rng is not None and rng.random() < 0.001:
                break
            other.sendall(data)
    with contextlib.suppress(OSError):
        other.shutdown(socket.SHUT_RDWR)


class Stranger:
    """Has no secret. Says rubbish to every port it is told of, and asks the hub for things in its own language."""

    def __init__(self, post: Post) -> None:
        self._post, self._rng = post, random.Random(post.seed)
        self._context = zmq.Context()

    def strike(self, ports: list[tuple[str, int]]) -> None:
        until = time.monotonic() + STRIKE_S
        while time.monotonic() < until:
            self._rubbish(*self._rng.choice(ports))
            self._forge()

    def ask(self) -> list[str]:
        """What it got that it must not get."""
        got: list[str] = []
        keys = Keys.parse(self._post.secret) if self._post.secret else None
        with (
            contextlib.suppress(TensorHubError),
            Client(self._post.hub, **RUN, replica="stranger", keys=keys, connect_timeout_s=5.0) as client,
        ):
            got.append("was let in")
            got += [f"learned of version {info.version}" for info in client.versions(timeout_s=2.0)]
        return got

    def _rubbish(self, host: str, port: int) -> None:
        greeting = b"\xff" + b"\0" * 8 + b"\x7f\x03\x00NULL".ljust(55, b"\0")
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=0.2) as sock:
            kind = self._rng.randrange(4)
            if kind == 0:
                sock.sendall(self._rng.randbytes(self._rng.randrange(1, 4096)))
            elif kind == 1:  # as ZeroMQ, and then a frame of 2^60 bytes
                sock.sendall(greeting + b"\x02" + (1 << 60).to_bytes(8, "big"))
            elif kind == 2:
                sock.sendall(b"\0" * 3)  # a piece of a header, held for a moment
                time.sleep(0.05)
            sock.settimeout(0.05)
            sock.recv(1 << 12)

    def _forge(self) -> None:
        """Messages as workers send them, with bytes changed."""
        with self._context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.ROUTING_ID, self._rng.randbytes(16))
            dealer.connect(self._post.hub)
            for message in (messages.AskVersions(1), messages.Retain(2, 1000), messages.Wait(3, 0, 0, 1.0)):
                data = bytearray(messages.encode(message))
                for _ in range(self._rng.randrange(3)):
                    data[self._rng.randrange(len(data))] = self._rng.randrange(256)
                with contextlib.suppress(zmq.ZMQError):
                    dealer.send(bytes(data), zmq.NOBLOCK)
            dealer.poll(20)
