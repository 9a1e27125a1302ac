"""The secret of a job's own hub: the job's processes have it, and nobody else finds it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray")

from tensorhub_plugins import core  # noqa: E402
from tensorhub_plugins.core import Client, DeadlineExceeded, UsageError  # noqa: E402
from tensorhub_plugins.core.cli import main  # noqa: E402
from tensorhub_plugins.core.options import TrainingOptions  # noqa: E402
from tensorhub_plugins.core.security import secret as core_secret  # noqa: E402
from tensorhub_plugins.vllm.ray import hub, secret  # noqa: E402
from tensorhub_plugins.vllm.ray.config import connect  # noqa: E402

RAY_TOKEN = "0123456789abcdef0123456789abcdef"


@pytest.mark.smoke
@pytest.mark.heavy
def test_nothing_is_to_be_configured(events: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.delenv("TENSORHUB_SECRET", raising=False)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        actor, address = hub.start()
        assert not address.startswith("tcp://127.")  # others could reach it

        @ray.remote
        def publish() -> list[int]:
            import torch

            options = TrainingOptions(hub=address, run="r", transports=("tcp",))
            with connect(options, replica="trainer") as client:
                client.publish(1, {"w": torch.ones(3)})
                return [info.version for info in client.versions()]

        assert ray.get(publish.remote(), timeout=60) == [1]
        with pytest.raises(UsageError, match="asks for the run's secret"):
            Client(address, run="r", model="actor", replica="stranger")
        command = hub.command_of(actor, address).split()
        assert main(command[1:]) == 1  # as a person on the head node, who is told of that stranger
        out = capsys.readouterr().out
        assert "another secret than the run's, or none" in out
        known = secret.learn()
        assert known is not None and os.environ.pop("TENSORHUB_SECRET") == known
        session = Path(ray.get_runtime_context().get_temp_dir()) / ray.get_runtime_context().get_session_name()
        shown = [path.read_bytes() for path in (session / "logs").rglob("*") if path.is_file()]
        shown += [path.read_bytes() for path in events.rglob("*") if path.is_file()]
        shown += [out.encode(), *_command_lines()]
        assert any(address.encode() in text for text in shown)  # the control: this would be found
        assert not any(known.encode() in text for text in shown)
        assert Path(command[-1]).stat().st_mode & 0o777 == 0o600
        assert Path(command[-1]).read_text().strip() == known
    finally:
        ray.shutdown()


def _command_lines() -> list[bytes]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            found.append((process / "cmdline").read_bytes())
        except OSError:
            continue  # it has ended
    return found


def spelt(package: Path) -> list[str]:
    """The files that write the variable's name down as a value."""
    return [file.name for file in sorted(package.rglob("*.py")) if '"TENSORHUB_SECRET"' in file.read_text()]


def test_it_is_handed_on_where_core_looks(tmp_path: Path) -> None:
    assert spelt(Path(core.__path__[0]).parent) == ["secret.py"] and core.SECRET_VARIABLE == core_secret.SECRET_VARIABLE
    (tmp_path / "names.py").write_text('VARIABLE = "TENSORHUB_SECRET"\n')
    assert spelt(tmp_path) == ["names.py"]  # the control


def test_ray_s_token_is_the_secret_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TENSORHUB_SECRET", "TENSORHUB_SECRET_FILE", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    assert secret.choose().own() != secret.choose().own()  # a new one
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", RAY_TOKEN)
    by_text = secret.choose()
    (tmp_path / "token").write_text(RAY_TOKEN + "\n")
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    assert secret.choose().own() == by_text.own()
    monkeypatch.setenv("TENSORHUB_SECRET", "x" * 32)
    assert secret.choose().own() != by_text.own()


def test_what_ray_has_not_done_in_time_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a node that was overloaded the run ended with "Get timed out: some object(s) not ready"."""

    def get(*_: Any, **__: Any) -> Any:
        raise ray.exceptions.GetTimeoutError("Get timed out: some object(s) not ready.")

    monkeypatch.setattr(ray, "get", get)
    for question in (lambda: hub.address_of(Asked()), lambda: hub.command_of(Asked(), "tcp://h:1")):
        with pytest.raises(DeadlineExceeded, match="Ray has not started the hub on its head node: look whether"):
            question()


class Asked:
    """An actor of which any method may be called."""

    def __getattr__(self, name: str) -> Any:
        return self

    def remote(self) -> None:
        return None
