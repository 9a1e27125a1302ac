"""Keys derived from a secret, and where a process finds it."""

from __future__ import annotations

import logging
import stat
from pathlib import Path

import pytest
import zmq

from tensorhub_plugins.core.errors import UsageError
from tensorhub_plugins.core.security import secret
from tensorhub_plugins.core.security.keys import Keys, _derive

SECRET = bytes(range(32))
TOKEN = "0123456789abcdef0123456789abcdef"  # as Ray makes them


def test_derivation_is_hkdf() -> None:
    """RFC 5869: extract with the salt, then the first block of expand. Computed here by the letter of it."""
    cryptography = pytest.importorskip("cryptography.hazmat.primitives.kdf.hkdf")
    from cryptography.hazmat.primitives.hashes import SHA256

    theirs = cryptography.HKDF(SHA256(), 32, b"tensorhub_plugins 1", b"hub").derive(SECRET)
    assert _derive(SECRET, "hub") == theirs
    assert _derive(SECRET, "lease") != theirs


def test_every_key_differs_and_the_same_secret_gives_the_same() -> None:
    keys, again, other = Keys.of(SECRET), Keys.of(SECRET), Keys.of(bytes(32))
    public = [keys.hub_public(), *(keys.limited(role).own()[0] for role in ("publisher", "reader", "observer"))]
    assert len({*public, keys.lease_key}) == 5
    assert public[1:] == [again.limited(role).own()[0] for role in ("publisher", "reader", "observer")]
    assert not set(keys.admitted()) & set(other.admitted())
    assert zmq.curve_public(keys.of_hub()) == keys.hub_public()


@pytest.mark.parametrize("role", ["publisher", "reader", "observer"])
def test_a_key_survives_its_file(role: str, tmp_path: Path) -> None:
    keys = Keys.of(SECRET).limited(role)
    secret.write(tmp_path / "key", keys)
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    read = secret.read(tmp_path / "key")
    assert (read.role, read.own(), read.hub_public(), read.lease_key) == (
        role,
        keys.own(),
        keys.hub_public(),
        keys.lease_key,
    )
    with pytest.raises(UsageError, match="is there already"):
        secret.write(tmp_path / "key", keys)


def test_a_role_leads_to_no_other(tmp_path: Path) -> None:
    reader = Keys.of(SECRET).limited("reader")
    for attempt in (lambda: reader.limited("publisher"), reader.of_hub, reader.admitted):
        with pytest.raises(UsageError, match="is the key of a reader"):
            attempt()
    assert Keys.of(SECRET).limited("observer").lease_key == b""
    with pytest.raises(UsageError, match="choose one of publisher, reader, observer"):
        Keys.of(SECRET).limited("king")  # type: ignore[arg-type]


@pytest.mark.parametrize("text", [TOKEN, TOKEN + "\n", "a longer text with blanks in it, of more than 32 characters"])
def test_any_long_text_is_a_secret(text: str) -> None:
    keys = Keys.parse(text)
    assert keys.role == "publisher" and Keys.parse(keys.text()).own() == keys.own()
    assert Keys.parse(text.strip() + "x").own() != keys.own()


@pytest.mark.parametrize(
    "text", ["", "short", "x" * 5000, "two\nlines of text which are long enough", "tensorhub-secret:abc", "\0" * 40]
)
def test_what_is_no_secret_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(UsageError, match="no secret|is damaged") as caught:
        Keys.parse(text)
    assert not text or text not in str(caught.value)


def test_no_key_is_shown() -> None:
    keys = Keys.of(SECRET)
    assert repr(keys) == f"{keys}" == "Keys(role='publisher')"


def test_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def given(file: str = "", text: str = "") -> Keys | None:
        monkeypatch.setenv("TENSORHUB_SECRET_FILE", file)
        monkeypatch.setenv("TENSORHUB_SECRET", text)
        return secret.from_environment()

    assert given() is None
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o600)
    by_text, by_file = given(text=TOKEN), given(str(file), "x" * 40)
    assert by_text is not None and by_file is not None and by_text.own() == by_file.own()
    assert not caplog.records
    file.chmod(0o644)
    with caplog.at_level(logging.WARNING):
        given(str(file))
    assert "can be read by other users" in caplog.text
    with pytest.raises(UsageError, match="TENSORHUB_SECRET_FILE=/no/such/file cannot be read: No such file"):
        given("/no/such/file")
    with pytest.raises(UsageError, match="^TENSORHUB_SECRET: this is no secret"):
        given(text="short")
