"""TRL's weight transfer over the store, called as TRL calls it. What TRL itself does with it: recipes/trl_grpo."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5")

import torch
import transformers
from safetensors.torch import load_file
from vllm_engines import make_model, wait_until

from tensorhub_plugins.core import CHECKPOINT, Client, Server, UsageError, VersionRefused
from tensorhub_plugins.core.types import attempt_of
from tensorhub_plugins.vllm.trl import StoreTransfer, _lacks

TIMEOUT_S = 20.0
ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def joined(hub: Server, folder: Path, **options: Any) -> Iterator[StoreTransfer]:
    transfer = StoreTransfer(hub.address, str(folder), **options)
    transfer.init_weight_transfer()
    try:
        yield transfer
    finally:
        transfer._publisher.close()


def trained(folder: Path, frozen: Callable[[str], bool] = lambda name: False) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what TRL streams: the trained parameters of the model, tied ones once."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    yield from ((name, each.detach()) for name, each in model.named_parameters() if not frozen(name))


def read(hub: Server, newer_than: int = 0) -> tuple[int, dict[str, torch.Tensor]]:
    with Client(hub.address, run="default", model="actor", replica="rollout") as reader:
        version = reader.wait(newer_than=newer_than, timeout_s=TIMEOUT_S)
        fetched = reader.fetch(version, (CHECKPOINT,), timeout_s=TIMEOUT_S)
        return version, {name: tensor.clone() for name, tensor in fetched.tensors().items()}


def same(found: dict[str, torch.Tensor], folder: Path) -> bool:
    saved = {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}
    return found.keys() == saved.keys() and all(torch.equal(found[name], tensor) for name, tensor in saved.items())


@pytest.mark.parametrize("kind", ["qwen2-tied", "qwen2-untied", "mixtral"])
def test_a_version_is_the_checkpoint_that_would_be_saved(kind: str, hub: Server, tmp_path: Path) -> None:
    """Fused experts come apart, tied weights come once, and the second version is the second model."""
    first, second = (make_model(kind, tmp_path / str(seed), seed) for seed in (1, 2))
    version = 0
    with joined(hub, first) as transfer:
        for folder in (first, second):
            transfer.pause()
            transfer.send_weights(trained(folder))
            transfer.resume()
            version, found = read(hub, version)
            assert same(found, folder)
        assert not same(found, first)


def test_what_is_frozen_is_added_from_disk(hub: Server, tmp_path: Path) -> None:
    folder, tuned = (make_model("qwen2-untied", tmp_path / str(seed), seed) for seed in (1, 2))
    with joined(hub, folder) as transfer:
        transfer.send_weights(trained(tuned, frozen=lambda name: ".mlp." in name))
        _, found = read(hub)
    base, new = (load_file(next(each.glob("*.safetensors"))) for each in (folder, tuned))
    assert found.keys() == base.keys()
    assert all(torch.equal(t, (base if ".mlp." in name else new)[name]) for name, t in found.items())


def test_what_is_not_this_model_is_refused_and_the_next_one_is_published(hub: Server, tmp_path: Path) -> None:
    folder, other = make_model("mixtral", tmp_path / "mixtral", 1), make_model("llama", tmp_path / "llama", 1)
    with joined(hub, folder) as transfer:
        with pytest.raises(UsageError, match="mlp.gate_proj.weight, which is no parameter of"):
            transfer.send_weights(trained(other))
        transfer.send_weights(trained(folder))
        assert same(read(hub)[1], folder)
    for file in other.glob("*.safetensors"):
        file.unlink()
    with joined(hub, other, model="llama") as transfer, pytest.raises(UsageError, match="does not hold it"):
        transfer.send_weights([])


def test_a_run_that_starts_again_supersedes_its_former_life(hub: Server, tmp_path: Path) -> None:
    folder = make_model("qwen2-tied", tmp_path / "model", 1)
    with Client(hub.address, run="default", model="actor", replica="server"):  # as long as one is there, the hub knows
        with joined(hub, folder) as transfer:
            for _ in range(3):
                transfer.send_weights(trained(folder))
            before, _ = read(hub)
        with joined(hub, folder) as transfer:
            transfer.send_weights(trained(folder))
            after, found = read(hub, before)
            assert attempt_of(after) == attempt_of(before) + 1 and same(found, folder)


@contextmanager
def server_that_says(answers: list[Any]) -> Iterator[tuple[str, list[str]]]:
    """Run a server that gives these answers in turn, and the last one for ever."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            answer = answers.pop(0) if len(answers) > 1 else answers[0]
            self.send_response(answer if isinstance(answer, int) else 200)
            self.end_headers()
            self.wfile.write(b"" if isinstance(answer, int) else json.dumps(answer).encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/", asked
    finally:
        server.shutdown()
        server.server_close()


def has(version: int) -> dict[str, Any]:
    return {"following": {"version": version}}


def test_the_training_waits_until_its_servers_have_the_version(
    hub: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_model("qwen2-tied", tmp_path / "model", 1)
    gone = "http://127.0.0.1:9"  # does not answer, and holds nobody up
    with joined(hub, folder) as transfer:
        transfer.send_weights(trained(folder))
        version, _ = read(hub)
        with server_that_says([has(0), 503, has(0), has(version)]) as (url, asked):
            transfer._servers = [gone, url.rstrip("/")]
            transfer.resume()
            assert asked.count("/tensorhub") >= 2
        with server_that_says([has(version - 1)]) as (url, asked), caplog.at_level(logging.WARNING):
            transfer._servers, transfer._confirm_s = [url.rstrip("/")], 0.2
            transfer.resume()
            assert "not yet at" in caplog.text
        for wrong in (404, {"following": None}, {}, [], "?", {"following": {"version": None}}, {"following": 1}):
            with server_that_says([wrong]) as (url, _), pytest.raises(UsageError, match="does not follow the store"):
                transfer._servers = [url.rstrip("/")]
                transfer.resume()


def test_nobody_waits_for_servers_that_refuse_a_version(
    hub: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_model("qwen2-tied", tmp_path / "model", 1)
    with joined(hub, folder, confirm_s=600.0) as transfer:
        transfer.send_weights(trained(folder))
        version, _ = read(hub)
        refuses = {"following": {"version": version - 1, "refusal": [version, "head.weight is missing"]}}
        with server_that_says([refuses]) as (url, _), server_that_says([has(0), has(version)]) as (other, _):
            transfer._servers = [url.rstrip("/"), other.rstrip("/")]
            transfer.resume()  # some have it
            assert "head.weight is missing" in caplog.text
            transfer._servers = [url.rstrip("/")]
            with pytest.raises(VersionRefused, match=r"head\.weight is missing"):
                transfer.resume()


def test_nobody_waits_for_servers_that_a_pin_holds(
    hub: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_model("qwen2-tied", tmp_path / "model", 1)
    with joined(hub, folder, confirm_s=600.0) as transfer:
        transfer.send_weights(trained(folder))
        first, _ = read(hub)
        transfer._client.pin(first)
        wait_until(lambda: transfer._client.pinned == first, "the trainer has heard of the pin")
        with server_that_says([has(0), has(first)]) as (url, asked):
            transfer._servers = [url.rstrip("/")]
            transfer.resume()  # the pinned one is waited for
            assert len(asked) == 2 and "is pinned" not in caplog.text
            transfer.send_weights(trained(folder))
            transfer.resume()
            assert len(asked) == 3 and f"training goes on: version {first} is pinned" in caplog.text


def test_a_server_that_dies_as_it_answers_holds_nobody_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            for told in (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{", b"garbage\r\n\r\n"):
                with listening.accept()[0] as connection:
                    connection.recv(1000)
                    connection.sendall(told)

        answering = threading.Thread(target=answer)
        answering.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        assert [_lacks(url, 7), _lacks(url, 7)] == [None, None]
        answering.join(TIMEOUT_S)


def test_a_training_that_fails_before_it_has_joined_says_why(hub: Server, tmp_path: Path) -> None:
    """TRL leaves in any case, once."""
    transfer = StoreTransfer(hub.address, str(tmp_path))
    transfer.destroy()
    transfer.init_weight_transfer()
    for _ in range(2):
        transfer.destroy()
    for servers in ("http://server:8000", ["server:8000"]):
        with pytest.raises(UsageError, match="list of base URLs"):
            StoreTransfer(hub.address, str(tmp_path), servers=servers)


def test_names_of_a_compiled_model_and_memory_that_changes_after_it_was_sent(hub: Server, tmp_path: Path) -> None:
    """TRL takes merged adapters apart again as soon as it has sent them; an iterator that fails is of one send only."""
    folder = make_model("qwen2-tied", tmp_path / "model", 1)
    sent = [(f"_orig_mod.{name}", tensor) for name, tensor in trained(folder)]

    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield sent[0]
        raise OSError("a rank is gone")

    with joined(hub, folder) as transfer:
        with pytest.raises(OSError, match="a rank is gone"):
            transfer.send_weights(failing())
        transfer.send_weights(iter(sent))
        for _, tensor in sent:
            tensor.zero_()
        assert same(read(hub)[1], folder)


@pytest.mark.heavy
@pytest.mark.long
def test_trl_trains_with_servers_that_pull(tmp_path: Path) -> None:
    """The recipe with TRL itself; its checks are the recipe's own."""
    pytest.importorskip("trl", reason="no TRL here: make test-trl fetches it")
    pytest.importorskip("vllm")
    assert subprocess.run([sys.executable, "-m", "recipes.trl_grpo", "--out", str(tmp_path)], cwd=ROOT).returncode == 0
