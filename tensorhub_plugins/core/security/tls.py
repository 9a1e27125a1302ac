"""TLS between workers, for links that others can listen on: which certificates are valid, and when TLS is required.

Both ends show a certificate of one CA that belongs to the run alone: its holder is a worker of the run. Names and
addresses in certificates are not checked, because workers come and go; leases limit what a reader may read (leases.py).
"""

from __future__ import annotations

import os
import ssl
from pathlib import Path

import msgspec

from tensorhub_plugins.core.errors import UsageError
from tensorhub_plugins.core.files import opened
from tensorhub_plugins.core.security.secret import warn_if_shared

CERT_VARIABLE = "TENSORHUB_TLS_CERT"
KEY_VARIABLE = "TENSORHUB_TLS_KEY"
CA_VARIABLE = "TENSORHUB_TLS_CA"
MODE_VARIABLE = "TENSORHUB_TLS"
ROUNDS_MAX = 8  # of a handshake; TLS 1.3 takes three
PEM_BYTES_MAX = 1 << 20  # four times what a system's bundle of all authorities has


class TlsFiles(msgspec.Struct, frozen=True):
    """Paths of PEM files: this worker's certificate (chain), its key, and the CA's certificate."""

    cert: str
    key: str
    ca: str


def files_from_environment() -> TlsFiles | None:
    """Return the files for TLS; None: it is not configured. Raise UsageError when only some of the three are named."""
    must = is_required()
    named = {
        CERT_VARIABLE: os.environ.get(CERT_VARIABLE, ""),
        KEY_VARIABLE: os.environ.get(KEY_VARIABLE, ""),
        CA_VARIABLE: os.environ.get(CA_VARIABLE, ""),
    }
    lacking = [name for name, path in named.items() if not path]
    if len(lacking) == len(named) and not must:
        return None
    if lacking:
        raise UsageError(f"TLS needs three files, and {', '.join(lacking)} names none: set it, or none of them")
    return TlsFiles(*named.values())


def is_required() -> bool:
    """Return whether nothing may be read from another data centre, or served to one, without TLS. Raise UsageError for
    an unknown value."""
    said = os.environ.get(MODE_VARIABLE, "")
    if said not in ("", "required"):
        raise UsageError(f"{MODE_VARIABLE}={said!r:.80}: required, or nothing")
    return said == "required"


def is_required_of(data_center: str) -> bool:
    """Return the same for a worker in this data centre. Raise UsageError for "": all others would count as near."""
    if is_required() and not data_center:
        raise UsageError(
            f"{MODE_VARIABLE}=required says how weights go to another data centre, and this worker's has no name: set "
            "TENSORHUB_DATA_CENTER on all workers"
        )
    return is_required()


def contexts(files: TlsFiles) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return the contexts to read with and to serve with. Raise UsageError that names the file that cannot be used."""
    files = TlsFiles(*map(os.path.expanduser, (files.cert, files.key, files.ca)))
    for path in (files.cert, files.key, files.ca):
        _check_readable(path, is_secret=path == files.key)
    reads, serves = _context(files, server_side=False), _context(files, server_side=True)
    try:
        _meet(reads, serves)
    except ssl.SSLError as error:  # expired, not yet valid, of another CA, not for both ends: all would refuse us
        why = getattr(error, "verify_message", "") or error
        raise UsageError(f"TLS: {files.cert} is no certificate that {files.ca} vouches for now: {why}") from error
    return reads, serves


def _check_readable(path: str, *, is_secret: bool) -> None:
    try:
        with opened(Path(path), PEM_BYTES_MAX) as file:
            if is_secret:
                warn_if_shared(file, f"the TLS key {path}")
    except OSError as error:
        raise UsageError(f"TLS cannot read {path}: {error.strerror}") from error


def _context(files: TlsFiles, *, server_side: bool) -> ssl.SSLContext:
    """Return one end's context: mutual authentication, TLS 1.3."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.check_hostname = False
    made.verify_mode = ssl.CERT_REQUIRED
    if server_side:
        made.num_tickets = 0  # no session is resumed, and a reader would take a ticket for the start of an answer

    def passphrase() -> str:  # without this OpenSSL asks at the terminal, and waits
        raise UsageError(f"TLS cannot use {files.key}: it is encrypted; take a key without a passphrase, mode 0600")

    what = f"{files.cert} and {files.key}"
    try:
        made.load_cert_chain(files.cert, files.key, passphrase)
        what = files.ca
        made.load_verify_locations(files.ca)
    except OSError as error:  # an SSLError is one
        raise UsageError(f"TLS cannot use {what}: {error}") from error
    return made


def _meet(reads: ssl.SSLContext, serves: ssl.SSLContext) -> None:
    """Let this worker do a handshake with itself, in memory: each end checks the certificate as all others will."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [reads.wrap_bio(back, there), serves.wrap_bio(there, back, server_side=True)]
    for _ in range(ROUNDS_MAX):
        for end in list(ends):
            try:
                end.do_handshake()
                ends.remove(end)
            except ssl.SSLWantReadError:
                continue
        if not ends:
            return
    raise ssl.SSLError("the handshake does not end")
