"""Certificates for tests: a CA of a run, and workers that it has signed."""

from __future__ import annotations

import datetime
import secrets
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tensorhub_plugins.core.security.tls import TlsFiles


def run_files(
    folder: Path, *, days: tuple[int, int] = (-1, 1), servers_only: bool = False, passphrase: bytes = b""
) -> TlsFiles:
    """Make a CA of its own, and one worker's certificate. days: from now, between which that is valid."""
    folder.mkdir(parents=True, exist_ok=True)
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    names = f"CA {secrets.token_hex(8)}", "worker"  # short: a common name has at most 64 characters
    ca_name, name = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, word)]) for word in names)
    now = datetime.datetime.now(datetime.timezone.utc)

    def signed(subject: x509.Name, of: ec.EllipticCurvePrivateKey, *, ca: bool) -> x509.Certificate:
        begun = x509.CertificateBuilder().subject_name(subject).issuer_name(ca_name).public_key(of.public_key())
        first, last = (now + datetime.timedelta(day) for day in ((-9, 9) if ca else days))
        numbered = begun.not_valid_before(first).not_valid_after(last).serial_number(x509.random_serial_number())
        if servers_only and not ca:
            numbered = numbered.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        return numbered.add_extension(x509.BasicConstraints(ca, None), critical=True).sign(ca_key, hashes.SHA256())

    pem = serialization.Encoding.PEM
    paths = {each: folder / f"{each}.pem" for each in ("cert", "key", "ca")}
    paths["cert"].write_bytes(signed(name, key, ca=False).public_bytes(pem))
    paths["ca"].write_bytes(signed(ca_name, ca_key, ca=True).public_bytes(pem))
    sealed = serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption()
    paths["key"].write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, sealed))
    paths["key"].chmod(0o600)
    return TlsFiles(*(str(paths[each]) for each in ("cert", "key", "ca")))
