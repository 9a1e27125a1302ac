"""Bad versions among good ones, while clients ask all the time: nothing is lost, and no bad version is ever served.

One `vllm serve` that follows at once, for each of two models. Every bad version is published from the weights that are
not being served, so that even a part of it would show in the answers.
"""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("transformers.core_model_loading", reason="needs transformers 5")
pytest.importorskip("requests")

import requests
import torch
import transformers
from vllm_engines import Engine, wait_until
from vllm_servers import Server, serving

from recipes.verl_grpo.make_model import make_model, make_tokenizer
from tensorhub_plugins.core import CHECKPOINT, Client, start_server
from tensorhub_plugins.vllm import checkpoint_tensors

LOAD = [pytest.mark.heavy, pytest.mark.long, pytest.mark.timeout(1500)]

REPEATS = 4  # of every kind: 13 kinds for each of two models are 104 bad versions
PAIRS = 4  # every so many bad versions the next one is bad, too
STEP_TIMEOUT_S = 90.0  # until one version is taken or refused; a follower waits for seconds after a failure
STREAMS = 3  # clients that wait for their answers; one more reads a stream, and one does not stay to the end
PROBES = [[10, 11, 12, 13], [40, 41, 42], [70, 7, 21, 44, 90]]
PROBE_TOKENS = 24
TRAINER = {CHECKPOINT: ("trainer/0",)}  # who holds a version that nobody has taken

Tensors = dict[str, torch.Tensor]
Damage = Callable[[Tensors, random.Random], Tensors]


# --- kinds of bad versions ---

LINEAR = r"(proj|w[123])\.weight$|^lm_head\.weight$"
EXPERT = r"experts\.\d+\.w[123]\.weight$"


def chosen(tensors: Tensors, pattern: str, rng: random.Random) -> str:
    return rng.choice([name for name in tensors if re.search(pattern, name)])


def without(pattern: str) -> Damage:
    def damage(tensors: Tensors, rng: random.Random) -> Tensors:
        lost = chosen(tensors, pattern, rng)
        return {name: tensor for name, tensor in tensors.items() if name != lost}

    return damage


def changed(change: Callable[[torch.Tensor], torch.Tensor], pattern: str = LINEAR) -> Damage:
    def damage(tensors: Tensors, rng: random.Random) -> Tensors:
        name = chosen(tensors, pattern, rng)
        return {**tensors, name: change(tensors[name])}

    return damage


def one_too_many(tensors: Tensors, rng: random.Random) -> Tensors:
    name = chosen(tensors, LINEAR, rng)
    return {**tensors, name.replace(".weight", ".more_weight"): tensors[name]}


def swapped(tensors: Tensors, rng: random.Random) -> Tensors:
    """Of different shapes; nobody could tell two of the same shape apart."""
    one = chosen(tensors, LINEAR, rng)
    other = rng.choice([name for name in tensors if tensors[name].shape != tensors[one].shape])
    return {**tensors, one: tensors[other], other: tensors[one]}


def transposed(tensors: Tensors, rng: random.Random) -> Tensors:
    name = rng.choice([name for name, t in tensors.items() if t.dim() == 2 and t.shape[0] != t.shape[1]])
    return {**tensors, name: tensors[name].T.contiguous()}


KINDS: dict[str, Damage] = {
    "a linear is missing": without(LINEAR),
    "a norm is missing": without(r"norm\.weight$"),
    "the embedding is missing": without(r"embed_tokens"),
    "an expert is missing": without(EXPERT),
    "a bias is missing": without(r"\.bias$"),
    "one too many": one_too_many,
    "rows are missing": changed(lambda tensor: tensor[:-2]),
    "rows too many": changed(lambda tensor: torch.cat([tensor, tensor[:2]])),
    "integers": changed(lambda tensor: tensor.to(torch.int32)),
    "fp8": changed(lambda tensor: tensor.to(torch.float8_e4m3fn)),
    "names are swapped": swapped,
    "transposed": transposed,
    "an empty tensor": changed(lambda tensor: tensor[:0]),
    "another model": lambda tensors, rng: tensors,  # it is given the tensors of the other model
}
NOT_IN = {"dense": "an expert is missing", "experts": "a bias is missing"}

# Fine are: another order, and another float dtype that holds the same values.
GOOD: list[Callable[[Tensors], Tensors]] = [
    lambda tensors: tensors,
    lambda tensors: dict(reversed(tensors.items())),
    lambda tensors: {name: tensor.float() for name, tensor in tensors.items()},
]


# --- models ---


def make(family: str, seed: int) -> Any:
    tokenizer = make_tokenizer()
    if family == "dense":
        model = make_model("tiny", tokenizer, seed)
    else:
        torch.manual_seed(seed)
        special = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "tie_word_embeddings": False}
        config = transformers.MixtralConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
            max_position_embeddings=512,
            **special,
        )
        model = transformers.MixtralForCausalLM(config).to(torch.bfloat16)
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms of ones and biases of zeros would hide a tensor that was not updated
            torch.nn.init.normal_(parameter, mean=1.0, std=0.2)
        else:
            parameter.data.mul_(10)  # so that other weights give other tokens
    return model


@pytest.fixture(scope="module")
def weights() -> dict[str, list[Tensors]]:
    return {family: [checkpoint_tensors(make(family, seed)) for seed in (1, 2)] for family in NOT_IN}


# --- the load ---


class Load:
    """Clients that ask without a pause between their requests, each in a thread of its own."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._lock = threading.Condition()
        self._busy, self._held, self._stopped = 0, False, False
        self.answered, self.left, self.failures = 0, 0, list[str]()
        clients = [self._wait_for_all] * STREAMS + [self._read_all, self._leave]
        self._threads = [
            threading.Thread(target=self._run, args=(client, random.Random(number)), daemon=True)
            for number, client in enumerate(clients)
        ]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._stopped, self._held = True, False
            self._lock.notify_all()
        for thread in self._threads:
            thread.join(STEP_TIMEOUT_S)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Nobody asks, and all that was asked has been answered."""
        with self._lock:
            self._held = True
            assert self._lock.wait_for(lambda: not self._busy, STEP_TIMEOUT_S), "requests hang"
        wait_until(lambda: self._server.running() == 0, "nothing runs", STEP_TIMEOUT_S)
        yield
        with self._lock:
            self._held = False
            self._lock.notify_all()

    def _run(self, client: Callable[[list[int], int], str], rng: random.Random) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: not self._held)
                if self._stopped:
                    return
                self._busy += 1
            try:
                wrong = client([rng.randrange(6, 100) for _ in range(rng.randrange(2, 40))], rng.randrange(8, 64))
            except Exception as error:
                wrong = f"{type(error).__name__}: {error}"
            with self._lock:
                self._busy -= 1
                if wrong:
                    self.failures.append(wrong)
                self._lock.notify_all()

    def _wait_for_all(self, prompt: list[int], tokens: int) -> str:
        reply = self._server.complete(prompt, tokens)
        self.answered += 1
        if reply.status_code != 200:
            return f"HTTP {reply.status_code}: {reply.text[:200]}"
        choice = reply.json()["choices"][0]
        right = len(choice["token_ids"]) == tokens and choice["finish_reason"] == "length"
        return "" if right else f"{len(choice['token_ids'])} of {tokens} tokens, {choice['finish_reason']}"

    def _read_all(self, prompt: list[int], tokens: int) -> str:
        with self._server.complete(prompt, tokens, stream=True) as reply:
            lines = [line.removeprefix(b"data: ") for line in reply.iter_lines() if line]
        self.answered += 1
        if reply.status_code != 200 or lines[-1] != b"[DONE]":
            return f"a stream of HTTP {reply.status_code} that ends with {lines[-1:]}"
        choices = [choice for line in lines[:-1] for choice in json.loads(line)["choices"]]
        read = sum(len(choice["token_ids"] or ()) for choice in choices)
        right = read == tokens and choices[-1]["finish_reason"] == "length"
        return "" if right else f"a stream of {read} of {tokens} tokens, {choices[-1]['finish_reason']}"

    def _leave(self, prompt: list[int], tokens: int) -> str:
        """In the middle of the answer, or before it."""
        if len(prompt) % 2:
            with suppress(requests.Timeout):
                self._server.complete(prompt, 200, timeout=0.02 + 0.01 * tokens)
            reply = None
        else:
            with self._server.complete(prompt, 200, stream=True) as reply:
                for _ in zip(range(tokens), reply.iter_lines(), strict=False):
                    pass
        self.left += 1
        return "" if reply is None or reply.status_code == 200 else f"HTTP {reply.status_code} to who left"


# --- the test ---


@pytest.mark.parametrize("family", NOT_IN)
def test_bad_versions_are_refused_and_cost_nobody_an_answer(
    family: str, weights: dict[str, list[Tensors]], tmp_path: Path
) -> None:
    ours, (others,) = weights[family], [weights[other][0] for other in NOT_IN if other != family]
    full, bare = save(family, tmp_path)
    expected = [fresh_answers(folder) for folder in full]
    assert expected[0] != expected[1]
    rng = random.Random(family)
    order = [kind for kind in KINDS if kind != NOT_IN[family]] * REPEATS
    rng.shuffle(order)
    with ExitStack() as stack:
        hub = stack.enter_context(start_server())
        trainer = stack.enter_context(Client(hub.address, run="default", model="actor", replica="trainer"))
        trainer.publish(1, ours[0])
        extra = {"hub": hub.address, "model": "actor", "replica": "server", "follow": "now"}
        server = stack.enter_context(serving(bare, tmp_path, extra))
        story = Story(server, trainer, stack.enter_context(Load(server)), ours)
        probed = set[str]()
        for number, kind in enumerate(order):
            damaged = others if kind == "another model" else KINDS[kind](ours[1 - story.good], rng)
            story.publish_bad(kind, damaged)
            if kind not in probed:
                probed.add(kind)
                with story.load.quiet():
                    assert answers(server) == expected[story.good], kind
            if number % PAIRS:
                story.publish_good()
        story.publish_good()
        with story.load.quiet():
            assert answers(server) == expected[story.good]
            assert server.healthy()
        load = story.load
        assert not load.failures
        assert load.answered > len(order) and load.left > len(order) / 2, "there was hardly any load"


class Story:
    """What the trainer publishes, and what must be so after each version."""

    def __init__(self, server: Server, trainer: Client, load: Load, ours: list[Tensors]) -> None:
        self.server, self.trainer, self.load, self._ours = server, trainer, load, ours
        self.good, self._version = 0, 1  # which of ours is served; the last version
        self._bad: dict[int, str] = {}  # since the last good one

    def publish_bad(self, kind: str, tensors: Tensors) -> None:
        self._version += 1
        self._bad[self._version] = kind
        self.trainer.publish(self._version, tensors)

        def refused() -> bool:
            self._check_bad()
            return self._is_refused(self._version)

        self._wait(refused, f"version {self._version} is refused ({kind})")
        self._check_bad()

    def publish_good(self) -> None:
        self._version += 1
        self.good = 1 - self.good
        self.trainer.publish(self._version, GOOD[self._version % len(GOOD)](self._ours[self.good]))
        after = f" after {list(self._bad.values())}" if self._bad else ""
        self._wait(lambda: self._holders(self._version) != TRAINER, f"version {self._version} is taken{after}")
        self._check_bad()
        self._bad.clear()
        for info in self.trainer.versions():
            if info.version < self._version:
                self.trainer.unpublish(info.version)

    def _check_bad(self) -> None:
        for version, kind in self._bad.items():
            assert self._holders(version) == TRAINER, f"version {version} was taken ({kind})"

    def _holders(self, version: int) -> dict[str, tuple[str, ...]]:
        (found,) = [dict(info.layouts) for info in self.trainer.versions() if info.version == version]
        return found

    def _is_refused(self, version: int) -> bool:
        """As the server's log says it."""
        lines = self.server.log.read_text(errors="replace").splitlines()
        return any("going on with version" in line and re.search(rf"\[version={version}\b", line) for line in lines)

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        def met() -> bool:
            assert self.server.process.poll() is None, f"the server has ended, before {what}: {self.server.log}"
            return condition()

        wait_until(met, f"{what}; see {self.server.log}", STEP_TIMEOUT_S)


def save(family: str, folder: Path) -> tuple[list[Path], Path]:
    """Folders of both models, and one without weights."""
    full = [folder / f"model-{seed}" for seed in (1, 2)]
    for seed, path in enumerate(full, 1):
        make(family, seed).save_pretrained(path)
        make_tokenizer().save_pretrained(path)
    bare = folder / "bare"
    make_tokenizer().save_pretrained(bare)
    for name in ("config.json", "generation_config.json"):
        (bare / name).write_bytes((full[0] / name).read_bytes())
    return full, bare


def answers(server: Server) -> list[list[int]]:
    """One after the other: other batches may round otherwise."""
    replies = [server.complete(prompt, PROBE_TOKENS) for prompt in PROBES]
    return [reply.json()["choices"][0]["token_ids"] for reply in replies]


def fresh_answers(folder: Path) -> list[list[int]]:
    options = {"load_format": "tensorhub", "model_loader_extra_config": {"disk": "only"}}
    with Engine(folder, extension=None, **options) as engine:
        return [engine.generate([prompt], PROBE_TOKENS)[0] for prompt in PROBES]


test_bad_versions_are_refused_and_cost_nobody_an_answer.pytestmark += LOAD


# --- negative controls ---


@pytest.mark.parametrize(("status", "tokens", "why"), [(500, 0, "HTTP 500"), (200, -1, "of .* tokens"), (200, 0, "")])
def test_the_load_sees_what_is_lost(status: int, tokens: int, why: str) -> None:
    """A server that answers with this status, and so many tokens more than were asked for."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # noqa: N802
            self._send(200, b"")

        def do_POST(self) -> None:  # noqa: N802
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer = {"choices": [{"finish_reason": "length", "token_ids": [1] * (asked["max_tokens"] + tokens)}]}
            text = json.dumps(answer, separators=(",", ":"))
            self._send(status, (f"data: {text}\n\ndata: [DONE]\n\n" if asked["stream"] else text).encode())

        def _send(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        server = Server(f"http://127.0.0.1:{http.server_port}", None, Path())
        with Load(server) as load:
            wait_until(lambda: load.answered > 10, "some answers")
        http.shutdown()
    assert bool(load.failures) == bool(why) and all(re.search(why, failure) for failure in load.failures)


def test_every_kind_is_bad_and_every_variant_good(weights: dict[str, list[Tensors]]) -> None:
    for family, (tensors, _) in weights.items():
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        for kind, damage in KINDS.items():
            if kind in (NOT_IN[family], "another model"):
                continue
            for seed in range(20):
                damaged = damage(tensors, random.Random(seed))
                same = {name: tensor.shape for name, tensor in damaged.items()} == shapes
                floats = all(tensor.is_floating_point() and tensor.element_size() > 1 for tensor in damaged.values())
                assert not (same and floats), f"{family}: {kind} is no damage"
        for variant in GOOD:
            good = variant(tensors)
            assert good.keys() == tensors.keys()
            assert all(torch.equal(good[name].to(tensors[name].dtype), tensors[name]) for name in tensors)
