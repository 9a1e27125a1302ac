"""TLS between workers: the conformance suite over it, who is let in, and when it has to be used."""

from __future__ import annotations

import contextlib
import functools
import socket
import ssl
import threading
import time
from pathlib import Path

import msgspec
import pytest
import torch

pytest.importorskip("cryptography", reason="makes the certificates")

from tls_files import run_files
from transport_helpers import FORGED, KEY, served, soon
from transport_suite import TransportSuite
from transport_suite.material import read_equal

from tensorhub_plugins.core import Client, HubUnreachable, Location, SourceLost, UsageError, start_server
from tensorhub_plugins.core.hub.limits import HubLimits
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.protocol.address import parse_address
from tensorhub_plugins.core.security import tls
from tensorhub_plugins.core.transports import TransportLimits, choices, nothing_in_common, unavailable
from tensorhub_plugins.core.transports.tcp import TcpTransport
from tensorhub_plugins.core.transports.tls import TlsChannel, TlsTransport

VARIABLES = (tls.CERT_VARIABLE, tls.KEY_VARIABLE, tls.CA_VARIABLE)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tls.TlsFiles:
    return run_files(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def suite(files: tls.TlsFiles):
    with TransportSuite(functools.partial(TlsTransport, files=files), garbage=FORGED) as suite:
        yield suite


@pytest.mark.slow
@pytest.mark.parametrize("case", TransportSuite.CASES)
def test_conformance(suite: TransportSuite, case: str) -> None:
    if reason := suite.skip_reason(case):
        pytest.skip(reason)
    suite.run(case)


def with_certificate(files: tls.TlsFiles, mine: tls.TlsFiles) -> TlsTransport:
    """A reader that says nothing of what is wrong with its own files, as a stranger's would not."""
    reader = TlsTransport(files=files)
    reads = tls._context(mine, server_side=False)
    reader._channel = functools.partial(TlsChannel, context=reads, server_side=False)
    return reader


@pytest.mark.parametrize("own", [True, False])
def test_a_stranger_with_another_ca_is_refused(files: tls.TlsFiles, tmp_path: Path, own: bool) -> None:
    """The control: who has a certificate of the run's reads."""
    mine = files if own else run_files(tmp_path)
    with served(TlsTransport(files=files)) as (_, endpoint), contextlib.closing(TlsTransport(files=mine)) as reader:
        assert endpoint.startswith("tls://")
        if own:
            assert reader.connect(endpoint, deadline=soon()).open(KEY, 1, deadline=soon())
        else:
            with pytest.raises(SourceLost, match="certificate verify failed"):
                reader.connect(endpoint, deadline=soon())


def test_a_source_asks_for_a_certificate_of_its_run_whatever_the_reader_believes(
    files: tls.TlsFiles, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A stranger that trusts the run's CA, and shows what another one has signed."""
    other = run_files(tmp_path)
    reading = contextlib.closing(with_certificate(files, tls.TlsFiles(other.cert, other.key, files.ca)))
    with served(TlsTransport(files=files)) as (_, endpoint), reading as reader, pytest.raises(SourceLost):
        reader.connect(endpoint, deadline=soon())
    assert "tls: refused tls://127.0.0.1" in caplog.text


BAD = {"expired": {"days": (-3, -1)}, "not yet valid": {"days": (1, 3)}, "unsuitable": {"servers_only": True}}


@pytest.mark.parametrize("why", BAD)
def test_a_certificate_of_the_run_that_is_not_good_for_it_now_is_refused(why: str, tmp_path: Path) -> None:
    """By its owner, before it asks anybody; and by a source that it asks nevertheless."""
    bad = run_files(tmp_path, **BAD[why])
    with pytest.raises(UsageError, match=f"cert.pem is no certificate that .*ca.pem vouches for now: .*{why}"):
        TlsTransport(files=bad)
    good = run_files(tmp_path / "good")
    both = tmp_path / "both.pem"
    both.write_text(Path(bad.ca).read_text() + Path(good.ca).read_text())
    trusting = tls.TlsFiles(good.cert, good.key, str(both))
    reading = contextlib.closing(with_certificate(trusting, tls.TlsFiles(bad.cert, bad.key, str(both))))
    with served(TlsTransport(files=trusting)) as (_, endpoint):
        with reading as reader, pytest.raises(SourceLost):
            reader.connect(endpoint, deadline=soon()).open(KEY, 1, deadline=soon())
        with contextlib.closing(TlsTransport(files=trusting)) as reader:  # the control
            assert reader.connect(endpoint, deadline=soon()).open(KEY, 1, deadline=soon())


def test_who_only_begins_a_handshake_keeps_nobody_out(files: tls.TlsFiles) -> None:
    """Strangers that say nothing, a part of a greeting, or all of it, and close their half, in all places there are."""
    limits = TransportLimits(readers_max=6, readers_per_peer_max=4, hello_s=30.0)
    hello = first_flight(files)
    with served(TlsTransport(files=files, limits=limits)) as (_, endpoint), contextlib.ExitStack() as stack:
        where = parse_address(endpoint, "tls")
        for round_ in range(5):
            for said in (b"", hello[:1], hello[:-1], hello):
                sock = stack.enter_context(socket.create_connection(where))
                sock.sendall(said)
                if round_ % 2:
                    sock.shutdown(socket.SHUT_WR)
            reader = stack.enter_context(contextlib.closing(TlsTransport(files=files)))
            assert reader.connect(endpoint, deadline=soon(20)).open(KEY, 1, deadline=soon(20))
            reader.close()


@pytest.mark.parametrize("trickles", [True, False])
def test_a_slow_handshake_ends_when_a_greeting_is_due(files: tls.TlsFiles, trickles: bool) -> None:
    hello = first_flight(files)
    with served(TlsTransport(files=files, limits=TransportLimits(hello_s=0.5))) as (_, endpoint):
        began = time.monotonic()
        with socket.create_connection(parse_address(endpoint, "tls")) as sock, contextlib.suppress(OSError):
            sock.settimeout(0.05)
            for at in range(len(hello) - 1):
                if trickles:
                    sock.sendall(hello[at : at + 1])
                with contextlib.suppress(TimeoutError):
                    if not sock.recv(1000):
                        break
                assert time.monotonic() - began < 10.0
        assert time.monotonic() - began >= 0.4


def first_flight(files: tls.TlsFiles) -> bytes:
    """What a reader's handshake begins with."""
    there = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        tls.contexts(files)[0].wrap_bio(ssl.MemoryBIO(), there).do_handshake()
    return there.read()


def test_plain_and_tls_do_not_understand_each_other(files: tls.TlsFiles) -> None:
    kinds = (lambda: TlsTransport(files=files)), TcpTransport
    for serving, reading in (kinds, kinds[::-1]):
        with served(serving()) as (_, endpoint), contextlib.closing(reading()) as reader, pytest.raises(SourceLost):
            reader.connect(f"{reader.name}://{endpoint.partition('://')[2]}", deadline=soon())


def test_a_stream_that_is_cut_short_is_a_loss(files: tls.TlsFiles) -> None:
    """Behind a relay that forwards so many bytes and then closes: no close_notify, and no hang."""
    tensors = {"a": torch.arange(1 << 20, dtype=torch.uint8)}
    with served(TlsTransport(files=files), tensors) as (_, endpoint), socket.create_server(("127.0.0.1", 0)) as relay:
        host, _, port = endpoint.removeprefix("tls://").rpartition(":")

        def forward() -> None:
            near, _ = relay.accept()
            with near, socket.create_connection((host, int(port))) as far:
                threading.Thread(target=pass_on, args=(near, far, 1 << 30), daemon=True).start()
                pass_on(far, near, 200_000)
                near.shutdown(socket.SHUT_RDWR)  # close alone waits for the thread that receives

        threading.Thread(target=forward, daemon=True).start()
        with contextlib.closing(TlsTransport(files=files)) as reader:
            link = reader.connect(f"tls://127.0.0.1:{relay.getsockname()[1]}", deadline=soon())
            manifest = link.open(KEY, 1, deadline=soon())
            got = []
            with pytest.raises(SourceLost, match="went away"):
                everything = range(manifest.segment_count)
                got.extend(read_equal(link, everything, Slab.allocate(manifest.tensors), deadline=soon()))
            assert len(got) < manifest.segment_count


def pass_on(source: socket.socket, target: socket.socket, most: int) -> None:
    with contextlib.suppress(OSError):
        while most > 0 and (data := source.recv(min(most, 1 << 16))):
            target.sendall(data)
            most -= len(data)


def test_nothing_of_the_weights_is_on_the_wire(files: tls.TlsFiles) -> None:
    """The control: over tcp it is."""
    for make, is_there in ((lambda: TlsTransport(files=files), False), (TcpTransport, True)):
        seen, marker = bytearray(), b"these are the weights"
        weights = torch.frombuffer(bytearray(marker * 200), dtype=torch.uint8)
        with served(make(), {"a": weights}) as (_, endpoint), socket.create_server(("127.0.0.1", 0)) as relay:
            scheme, _, where = endpoint.partition("://")
            host, _, port = where.rpartition(":")

            def forward(relay=relay, host=host, port=port, seen=seen) -> None:
                near, _ = relay.accept()
                with near, socket.create_connection((host, int(port))) as far:
                    threading.Thread(target=pass_on, args=(near, far, 1 << 30), daemon=True).start()
                    with contextlib.suppress(OSError):
                        while data := far.recv(1 << 16):
                            seen += data
                            near.sendall(data)

            threading.Thread(target=forward, daemon=True).start()
            with contextlib.closing(make()) as reader:
                link = reader.connect(f"{scheme}://127.0.0.1:{relay.getsockname()[1]}", deadline=soon())
                manifest = link.open(KEY, 1, deadline=soon())
                everything = range(manifest.segment_count)
                assert list(read_equal(link, everything, Slab.allocate(manifest.tensors), deadline=soon()))
        assert (marker in seen) is is_there


# --- when it is used ---


def test_between_sites_tls_comes_first_and_within_one_last() -> None:
    preferred, endpoints = ("shm", "tcp", "tls"), {"tcp": "t", "tls": "s"}
    assert choices(preferred, endpoints) == [("tcp", "t"), ("tls", "s")]
    assert choices(preferred, endpoints, far=True) == [("tls", "s"), ("tcp", "t")]
    assert choices(preferred, endpoints, far=True, tls_only=True) == [("tls", "s")]
    assert choices(preferred, endpoints, tls_only=True) == [("tcp", "t"), ("tls", "s")]
    assert choices(preferred, {"tcp": "t"}, far=True, tls_only=True) == []


def test_who_has_no_tls_hears_what_is_missing() -> None:
    assert "TENSORHUB_TLS_CERT" in nothing_in_common({"tls": "s"}, far=True, tls_only=False)
    assert "TENSORHUB_TLS=required" in nothing_in_common({"tcp": "t"}, far=True, tls_only=True)
    assert "over TLS only (TENSORHUB_TLS=required there)" in nothing_in_common({}, far=True, tls_only=False)
    assert nothing_in_common({"shm": "x"}, far=False, tls_only=True) == "no common transport: it has ['shm']"


@pytest.mark.slow
@pytest.mark.parametrize("required", [True, False])
def test_a_plain_source_of_another_site_is_refused_where_tls_is_required(
    monkeypatch: pytest.MonkeyPatch, files: tls.TlsFiles, required: bool
) -> None:
    """From client to client; the control reads, and with TLS at the source both do."""
    with start_server(limits=HubLimits(grace_s=0.2)) as hub, contextlib.ExitStack() as stack:

        def client(name: str, site: str, *transports: str) -> Client:
            at = Location(site, "", name)
            made = Client(hub.address, run="r", model="m", replica=name, location=at, transports=transports)
            return stack.enter_context(made)

        client("plain", "east", "tcp").publish(1, {"w": torch.ones(1000)})
        for name, path in zip(VARIABLES, (files.cert, files.key, files.ca), strict=True):
            monkeypatch.setenv(name, path)
        if required:
            monkeypatch.setenv(tls.MODE_VARIABLE, "required")
        reader = client("reader", "west", "tcp", "tls")
        if required:
            with pytest.raises(Exception, match="has no TLS, which TENSORHUB_TLS=required asks for"):
                reader.fetch(1, timeout_s=3)
        else:
            assert reader.fetch(1, timeout_s=10).version == 1
        client("safe", "east", "tcp", "tls").publish(2, {"w": torch.zeros(1000)})
        fetched = reader.fetch(2, timeout_s=10)
        assert set(fetched.report.transports) == {"tls"}


@pytest.mark.slow
@pytest.mark.parametrize("required", [True, False])
def test_a_source_that_requires_tls_is_not_read_without_by_another_site(
    monkeypatch: pytest.MonkeyPatch, files: tls.TlsFiles, required: bool
) -> None:
    """By a reader that lacks TLS and does not ask for it; the control reads, and so does a neighbour."""
    with start_server(limits=HubLimits(grace_s=0.2)) as hub, contextlib.ExitStack() as stack:

        def client(name: str, site: str) -> Client:
            at = Location(site, "", name)
            made = Client(hub.address, run="r", model="m", replica=name, location=at, transports=("tcp", "tls"))
            return stack.enter_context(made)

        for name, path in zip(VARIABLES, (files.cert, files.key, files.ca), strict=True):
            monkeypatch.setenv(name, path)
        if required:
            monkeypatch.setenv(tls.MODE_VARIABLE, "required")
        client("source", "east").publish(1, {"w": torch.ones(1000)})
        for name in (*VARIABLES, tls.MODE_VARIABLE):
            monkeypatch.delenv(name, raising=False)
        assert client("neighbour", "east").fetch(1, timeout_s=10).report.transports.keys() == {"tcp"}
        reader = client("reader", "west")
        if required:
            with pytest.raises(Exception, match="it wants TLS, which is not set up here"):
                reader.fetch(1, timeout_s=3)
        else:
            assert reader.fetch(1, timeout_s=10).report.transports.keys() == {"tcp"}


def test_who_requires_tls_says_where_it_is(
    monkeypatch: pytest.MonkeyPatch, files: tls.TlsFiles, address: str = "tcp://127.0.0.1:1"
) -> None:
    """Without a name all are in one data centre, and nothing would be encrypted."""
    for name, path in zip(VARIABLES, (files.cert, files.key, files.ca), strict=True):
        monkeypatch.setenv(name, path)
    monkeypatch.setenv(tls.MODE_VARIABLE, "required")
    for site, why in (("", "set TENSORHUB_DATA_CENTER"), ("east", "no hub answers")):
        with pytest.raises((UsageError, HubUnreachable), match=why):
            Client(address, run="r", model="m", replica="a", location=Location(site), connect_timeout_s=0.1)


def test_half_of_a_configuration_is_refused(monkeypatch: pytest.MonkeyPatch, files: tls.TlsFiles) -> None:
    for name in (*VARIABLES, tls.MODE_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    assert "name no files" in (unavailable("tls") or "")
    monkeypatch.setenv(tls.MODE_VARIABLE, "required")
    with pytest.raises(UsageError, match="TENSORHUB_TLS_CERT, TENSORHUB_TLS_KEY, TENSORHUB_TLS_CA"):
        unavailable("tls")
    monkeypatch.setenv(tls.CERT_VARIABLE, files.cert)
    with pytest.raises(UsageError, match="TENSORHUB_TLS_KEY, TENSORHUB_TLS_CA names none"):
        unavailable("tls")
    monkeypatch.setenv(tls.MODE_VARIABLE, "yes")
    with pytest.raises(UsageError, match="TENSORHUB_TLS='yes'"):
        unavailable("tls")
    with pytest.raises(UsageError, match="TLS cannot use .*cert.pem and .*ca.pem"):
        tls.contexts(tls.TlsFiles(files.cert, files.ca, files.ca))


@pytest.mark.parametrize("which", ["cert", "key", "ca"])
def test_a_file_that_cannot_be_read_is_named(files: tls.TlsFiles, which: str) -> None:
    wrong = msgspec.structs.replace(files, **{which: f"/nowhere/{which}.pem"})
    with pytest.raises(UsageError, match=f"TLS cannot read /nowhere/{which}.pem: No such file"):
        TlsTransport(files=wrong)


def test_a_key_with_a_passphrase_asks_nobody(tmp_path: Path) -> None:
    """OpenSSL would ask at the terminal, and a worker would wait there for ever."""
    files = run_files(tmp_path, passphrase=b"secret")
    with pytest.raises(UsageError, match="key.pem: it is encrypted"):
        TlsTransport(files=files)


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o604])
def test_a_key_that_others_can_read_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int) -> None:
    files = run_files(tmp_path)
    Path(files.key).chmod(mode)
    Path(files.cert).chmod(0o644)  # which everybody may read
    TlsTransport(files=files).close()
    said = f"the TLS key {files.key} can be read by other users of this host: chmod 600 it"
    assert [record.getMessage() for record in caplog.records] == ([] if mode == 0o600 else [said])
