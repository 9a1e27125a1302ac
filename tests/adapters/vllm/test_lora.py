"""LoRA adapters as versions: published by the trainer alone, built and swapped by a real vLLM, from memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

pytest.importorskip("vllm")
pytest.importorskip("peft")
pytest.importorskip("requests")

import requests
import torch
from vllm_adapters import RANK, Trained, refused, swapped
from vllm_engines import Engine, checkpoint, make_model, wait_until
from vllm_ranks import alone
from vllm_servers import Server, serving

from recipes.servers import until
from recipes.verl_grpo.make_model import make_model as make_tiny
from recipes.verl_grpo.make_model import make_tokenizer
from tensorhub_plugins.core import Client, Turns, UsageError, VersionRefused, start_server
from tensorhub_plugins.vllm import lora, names
from tensorhub_plugins.vllm.config import parse

NAME, OTHER = "actor.lora", "critic.lora"
ALIKE = ["a96464", "a122938"]  # their numbers are the same
PROMPT = [5, 6, 7, 8, 9]
TOKENS = 12
NEAR = 0.12  # of a log-probability: float32 by transformers, bfloat16 by vLLM
TIMEOUT_S = 30.0


# --- what is published ---


def test_what_is_published_is_read_again() -> None:
    given = {"m.lora_A.weight": torch.ones(2, 4), "m.lora_B.weight": torch.zeros(4, 2)}
    published = lora.adapter_tensors(given, {"r": 2, "lora_alpha": 4, "target_modules": {"m"}, "peft_type": "LORA"})
    assert published[lora.CONFIG].dtype == torch.uint8
    tensors, config = lora.adapter_of(published)
    assert tensors.keys() == given.keys() and all(tensors[name] is given[name] for name in given)
    assert (config["r"], config["target_modules"], config[lora.COUNT]) == (2, ["m"], 2)
    with pytest.raises(VersionRefused, match="came in part: 1 of its 2 tensors"):
        lora.adapter_of({name: each for name, each in published.items() if "lora_B" not in name})
    with pytest.raises(VersionRefused, match="this is no adapter"):
        lora.adapter_of(given)
    for text in (b"{", b"[1]", b"\xff", b"[" * 100_000, b'{"tensorhub_base": ["hidden_size"]}'):
        with pytest.raises(VersionRefused, match="no JSON object"):
            lora.adapter_of({**given, lora.CONFIG: torch.frombuffer(bytearray(text), dtype=torch.uint8)})


@pytest.mark.parametrize(
    ("given", "config", "words"),
    [
        ({}, {"r": 1}, "has no tensors"),
        ({"a": 1}, None, "pass config"),
        ({"a": 1}, {"peft_type": "IA3"}, "type IA3"),
        ({"a": 1}, {"init_lora_weights": "pissa_niter_4"}, "changes the base weights"),
        ({"a": 1}, {"init_lora_weights": "lora_ga"}, "changes the base weights"),
        ({"a": 1}, {"alora_invocation_tokens": [1]}, "alora_invocation_tokens, which engines do not apply"),
        (3, None, "is a int"),
        (SimpleNamespace(peft_config={"a": None}), None, "no adapter 'default': it has a"),
    ],
)
def test_what_no_engine_could_apply_is_not_published(given: Any, config: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        lora.adapter_tensors(given, config)


@pytest.mark.parametrize(
    ("given", "changes", "words"),
    [
        ({"lora": NAME}, {"lora_config": None}, "--enable-lora"),
        ({"lora": [NAME, OTHER]}, {}, "--max-loras 2"),
        ({"lora": [NAME, NAME]}, {}, "name each once"),
        ({"lora": ALIKE}, {"lora_config": SimpleNamespace(max_cpu_loras=2)}, "would take the adapter 'a96464' for"),
        ({"lora": "actor"}, {}, "not as the model"),
        ({"lora": NAME}, {"pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"lora": NAME}, {"data_parallel_size": 2}, "share experts"),
        ({"lora": NAME, "follow": "now", "may_be_held": True}, {}, 'for engines that "follow" the weights'),
        ({"may_be_held": True}, {}, 'for engines that "follow" the weights'),
    ],
)
def test_an_engine_that_cannot_take_adapters_is_refused(given: Any, changes: Any, words: str) -> None:
    def config(**changes: Any) -> Any:
        lora_config = changes.pop("lora_config", SimpleNamespace(max_cpu_loras=1))
        return SimpleNamespace(lora_config=lora_config, instance_id="i", parallel_config=SimpleNamespace(**changes))

    extra = {"hub": "tcp://127.0.0.1:1", "disk": "only"}
    start, joining = parse({**extra, "lora": NAME}, config())
    assert joining is not None and joining.lora == (NAME,) and start.follow is None
    with pytest.raises(UsageError, match=words):
        parse({**extra, **given}, config(**changes))


class Models:
    """Speaks as vLLM's OpenAIServingModels."""

    def __init__(self) -> None:
        self.lora_requests: dict[str, Any] = {}
        self.is_base_model = lambda name: name == "actor"

    async def load_lora_adapter(self, request: Any, base_model_name: str | None = None) -> str:
        self.lora_requests[request.lora_name] = base_model_name
        return "loaded"

    async def unload_lora_adapter(self, request: Any) -> str:
        del self.lora_requests[request.lora_name]
        return "unloaded"


def served() -> Any:
    """Return the configuration of a server with one adapter."""
    extra = {"hub": "tcp://127.0.0.1:1", "disk": "only", "lora": NAME}
    return SimpleNamespace(
        load_config=SimpleNamespace(model_loader_extra_config=extra),
        lora_config=SimpleNamespace(max_cpu_loras=1),
        instance_id="i",
        parallel_config=SimpleNamespace(data_parallel_size=2),  # of a dense model, as its server has it
        model_config=SimpleNamespace(is_moe=False),
    )


def test_the_base_model_does_not_answer_under_the_name_of_an_adapter() -> None:
    models, config = Models(), served()
    lora.offer(models, config)
    assert models.lora_requests == {NAME: lora.lora_request(NAME)}
    numbers = {lora.lora_request(name).lora_int_id for name in (NAME, OTHER, "")}  # vLLM goes by these alone
    assert len(numbers) == 3 and min(numbers) >= names.FIRST_ID and max(numbers) < 2**31
    models.is_base_model = lambda name: name in ("actor", NAME)
    with pytest.raises(UsageError, match="give another --served-model-name"):
        lora.offer(models, config)


async def test_files_do_not_answer_under_the_name_of_an_adapter_of_the_store() -> None:
    """vLLM's own routes put other matrices under its name, and the answers had the store's version."""
    from fastapi import HTTPException

    models = Models()
    lora.offer(models, served())
    ours, other = SimpleNamespace(lora_name=NAME), SimpleNamespace(lora_name=OTHER)
    for change in (models.unload_lora_adapter, models.load_lora_adapter):
        with pytest.raises(HTTPException, match="comes from the store") as raised:
            await change(ours)
        assert raised.value.status_code == 409
    assert models.lora_requests == {NAME: lora.lora_request(NAME)}
    assert await models.load_lora_adapter(request=other, base_model_name="actor") == "loaded"  # as --lora-modules does
    assert models.lora_requests[OTHER] == "actor"
    assert await models.unload_lora_adapter(other) == "unloaded"


def test_ranks_publish_an_adapter_in_parts() -> None:
    """What every rank has alike is published once, under the names and with the configuration of the whole."""
    import peft
    import transformers

    base = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
    base.config = transformers.PretrainedConfig()
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["0", "1"]))  # type: ignore[arg-type]
    whole, ranks = lora.adapter_tensors(model), [Turns(rank, 2) for rank in range(2)]
    shares = []
    for turns in ranks:
        held = [turns.one_of_all(name, tensor) for name, tensor in model.state_dict().items()]
        shares.append({one.whole.name: one for one in lora.adapter_parts(model, held, turns.rank)})
    assert shares[0].keys() == shares[1].keys() == whole.keys()
    for name, tensor in whole.items():
        given = [share[name].tensor for share in shares if share[name].tensor is not None]
        assert len(given) == 1 and shares[0][name].whole == shares[1][name].whole, name
        assert name == lora.CONFIG or torch.equal(given[0], tensor)  # type: ignore[arg-type]
    assert all(any(one.tensor is not None for one in share.values()) for share in shares)
    configs = [
        lora.adapter_of({**whole, lora.CONFIG: each})[1] for each in (whole[lora.CONFIG], shares[0][lora.CONFIG].tensor)
    ]
    assert configs[1] == {**configs[0], "base_model_name_or_path": ""}
    model.peft_config["default"].inference_mode = True  # as saving does
    base.config.architectures = ["Other"]
    again = {one.whole.name: one for one in lora.adapter_parts(model, held, 0)}
    assert again[lora.CONFIG].whole == shares[0][lora.CONFIG].whole, "or the version would be another model's"


def test_engines_of_a_framework_are_started_for_the_rank_and_asked_for_the_adapter() -> None:
    from vllm.config.lora import MaxLoRARanks

    assert tuple(sorted(get_args(MaxLoRARanks))) == lora.RANKS
    ranks = [lora.engine_arguments(rank)["max_lora_rank"] for rank in (1, 2, 16, 17, 512)]
    assert ranks == [1, 8, 16, 32, 512]
    has_version, asked = [False], list[Any]()
    generate = lora.for_adapter(lambda *args, **given: asked.append((args, given)), NAME, lambda: has_version[0])
    generate("prompt", lora_request="theirs")
    has_version[0] = True
    generate("prompt", request_id="r")
    assert asked == [
        (("prompt",), {"lora_request": None}),
        (("prompt",), {"request_id": "r", "lora_request": lora.lora_request(NAME)}),
    ]
    assert lora.history_of("actor") == lora.history_of("actor.lora") == NAME


# --- real vLLM ---


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("qwen3", tmp_path_factory.mktemp("models") / "base", 1)


@pytest.fixture(scope="module")
def stage(model: Path) -> Iterator[tuple[Engine, Client, Client]]:
    """An engine with two adapters, which steps when it is told to, and the trainers that publish these."""
    options = {"enable_lora": True, "max_lora_rank": RANK, "max_loras": 2, "enable_prefix_caching": True}
    with start_server() as hub:
        trainers = [Client(hub.address, run="r", model=name, replica="trainer") for name in (NAME, OTHER)]
        with trainers[0], trainers[1], Engine(model, **options) as engine:
            config = {"hub": hub.address, "run": "r", "model": "actor", "replica": "engine", "lora": [NAME, OTHER]}
            assert engine.call("tensorhub_connect_adapters", config) == [0, 0]
            yield engine, *trainers


def update(engine: Engine, version: int, name: str = NAME) -> dict[str, Any]:
    """Have the engine fetch and install this version; return the last answer, of a fetch that was refused too."""
    engine.ask("rpc", "tensorhub_start_fetch", (version, TIMEOUT_S, False, name))
    said: dict[str, Any] = {}

    def is_over() -> bool:
        said.update(engine.ask("rpc", "tensorhub_poll", (name,))[0])
        return said["state"] != "fetching"

    wait_until(is_over, f"version {version} was fetched")
    if said["state"] != "ready":
        return said
    engine.ask("pause")
    result = engine.ask("rpc", "tensorhub_install", (version, TIMEOUT_S, name))[0]
    engine.ask("resume")
    return dict(result)


def near(logprobs: list[float], wanted: list[float]) -> bool:
    return max(abs(one - other) for one, other in zip(logprobs, wanted, strict=True)) < NEAR


def agrees(engine: Engine, trained: Trained, name: str = NAME, *, adapter: bool = True) -> bool:
    """Return whether the engine's log-probabilities are those of the trainer's adapter as it is now."""
    tokens, logprobs = engine.ask("with_adapter", PROMPT, TOKENS, name if adapter else None)
    wanted = trained.logprobs(PROMPT, tokens, adapter=adapter)
    return near(logprobs, wanted)


@pytest.mark.heavy
@pytest.mark.timeout(400)
def test_log_probabilities_are_the_trainers_at_every_version(stage: tuple[Engine, Client, Client], model: Path) -> None:
    engine, trainer, other_trainer = stage
    trained, other = Trained(model), Trained(model, layers=["q_proj", "down_proj"], rank=4, seed=1)
    for version in (1, 2, 3):
        trainer.publish(version, trained.step(version))
        result = update(engine, version)
        assert result["installed"], result
        assert sum(result["report"]["sources"].values()) < 100_000  # the adapter's bytes; the model has 1.5 MB
        assert agrees(engine, trained)
    other_trainer.publish(1, other.step(1))
    assert update(engine, 1, OTHER)["installed"]
    assert agrees(engine, other, OTHER) and agrees(engine, trained) and agrees(engine, trained, adapter=False)
    assert not agrees(engine, trained, OTHER), "the control: another adapter's are not"
    trained.step(4)
    assert not agrees(engine, trained), "the control: another version's are not"
    trained.step(3)
    # vLLM forgets it, as when others push it out, and asks for it again by its path.
    assert engine.ask("rpc", "remove_lora", (lora.lora_request(NAME).lora_int_id,)) == [True]
    assert agrees(engine, trained) and agrees(engine, trained)


# --- vLLM's layers and its LoRA manager, without an engine ---

MISFITS = {
    "rank": "greater than max_lora_rank 8",
    "base": "another base model: ",
    "part": "came in part: 14 of its 28 tensors",
    "layer": "layers.7.mlp.down_proj is no module of this model",
    "shape": "o_proj is from 128 to 64, and the model's from 128 to 128",
    "lone": "up_proj has only one of its two matrices",
    "said rank": "has rank 8, and the configuration says r=4",
    "alpha": "alpha_pattern",
    "whole module": "modules_to_save",
    "dora": "DoRA",
    "bias": "Adapter bias is not supported",
    "weights": "no tensor is called adapter_config.json",
    "none": "it has no matrix of any module",
    "no matrix": "has tensors of shapes [1024] and",
    "no floats": "no floats: base_model",
    "nan": "the adapter has NaN or Inf: base_model",
    "inf": "the adapter has NaN or Inf: base_model",
    "twice": "two tensors of one name",
    "head": "lm_head is from 128 to 499, and the model's from 128 to 500",
    "embedding": "embed_tokens is from 500 to 127, and the model's from 500 to 128",
}


@pytest.mark.slow
def test_what_does_not_fit_is_refused_before_the_swap(model: Path) -> None:
    larger = make_model("qwen2-wide", model.parent / "wide", 1)
    found = alone(refused, model, larger, NAME)
    assert found.keys() == MISFITS.keys()
    for what, (kind, error, version, stays) in found.items():
        assert (kind, version, stays) == ("VersionRefused", 1, True), (what, error)
        assert MISFITS[what] in error


@pytest.mark.slow
def test_a_swap_that_fails_half_way_is_undone(model: Path) -> None:
    found = alone(swapped, model, NAME)
    assert "is not one of the store's here" in found.pop("another's path")
    assert found.pop("bytes") < 100_000  # of the adapter; the model has 1.5 MB
    assert found.pop("half way") == (False, "RuntimeError: out of memory", None, 4)
    installed, error, broken, version = found.pop("no place")
    assert (installed, broken, version) == (False, None, 5) and "pinned" in error
    assert all(found.values()), found


# --- `vllm serve` ---


class Lora:
    """A server that follows two adapters, and the trainer of one of them."""

    def __init__(self, server: Server, hub: str) -> None:
        self.server, self.hub = server, hub

    def ask(self, name: str, tokens: int = TOKENS) -> tuple[list[int], list[float], Mapping[str, str]]:
        """Return tokens, their log-probabilities and the headers of an answer."""
        body = {"model": name, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        more = {"logprobs": 0, "return_token_ids": True, "return_tokens_as_token_ids": True}
        reply = self.server.post("v1/completions", {**body, **more})
        reply.raise_for_status()
        choice = reply.json()["choices"][0]
        return choice["token_ids"], choice["logprobs"]["token_logprobs"], reply.headers

    def version(self, name: str) -> int:
        said = requests.get(f"{self.server.url}/tensorhub", timeout=60).json()["following"]
        return int(said["adapters"][name]["version"])

    def wait_for(self, version: int) -> None:
        until(lambda: self.version(NAME) == version, f"version {version} is installed", self.server.process)


@contextmanager
def serving_adapters(model: Path, out: Path, *options: str) -> Iterator[tuple[Lora, list[Client]]]:
    """Run a server whose base model is the store's, once, and which follows two adapters."""
    with start_server() as hub, ExitStack() as stack:
        names = ("base", NAME, OTHER)
        clients = [stack.enter_context(Client(hub.address, run="r", model=m, replica="trainer")) for m in names]
        clients[0].publish(1, checkpoint(model))
        for client, seed in zip(clients[1:], (6, 7), strict=True):
            client.publish(1, Trained(model, seed=seed).step(1))
        extra = {"hub": hub.address, "run": "r", "model": "base", "replica": "server", "lora": [NAME, OTHER]}
        lora_options = ["--enable-lora", "--max-loras", "2", "--max-lora-rank", str(RANK), "--max-model-len", "2048"]
        server = stack.enter_context(serving(model, out, extra, *lora_options, *options))
        yield Lora(server, hub.address), clients


@pytest.mark.heavy
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_server_follows_adapters_while_it_answers(tmp_path: Path) -> None:
    updates, lost, wrong = 300, list[Exception](), list[Any]()
    tokenizer, model = make_tokenizer(), tmp_path / "model"
    tokenizer.save_pretrained(model)
    make_tiny("tiny", tokenizer, 1).save_pretrained(model)
    from_disk = Trained(model, seed=99)
    from_disk.step(1)
    from_disk.peft.save_pretrained(tmp_path / "file")
    files = ("--lora-modules", f"file={tmp_path / 'file'}")  # one of vLLM's own beside them
    with serving_adapters(model, tmp_path, *files) as (server, (_, trainer, _other)):
        listed = requests.get(f"{server.server.url}/v1/models", timeout=60).json()["data"]
        assert {each["id"] for each in listed} == {"actor", "file", NAME, OTHER}
        tokens, logprobs, _ = server.ask("file")
        assert near(logprobs, from_disk.logprobs(PROMPT, tokens))
        trained, other = Trained(model, seed=6), Trained(model, seed=7)
        other.step(1)
        tokens, logprobs, headers = server.ask(OTHER)
        assert near(logprobs, other.logprobs(PROMPT, tokens)) and headers["X-TensorHub-Version-Last"] == "1"
        stop = threading.Event()

        def ask_always(name: str) -> None:
            while not stop.is_set():
                try:
                    answer = server.ask(name, 64)
                    (wrong if len(answer[0]) != 64 else []).append(answer)
                except Exception as error:
                    lost.append(error)

        asking = [threading.Thread(target=ask_always, args=(name,)) for name in (NAME, NAME, OTHER, "actor")]
        for each in asking:
            each.start()
        checked = 0
        for version in range(2, updates + 2):
            trainer.publish(version, trained.step(version))
            server.wait_for(version)
            if version % 10 == 0:
                tokens, logprobs, headers = server.ask(NAME)
                assert headers["X-TensorHub-Version-Last"] == str(version), headers
                assert near(logprobs, trained.logprobs(PROMPT, tokens)), version
                checked += 1
            if version > 2:
                trainer.unpublish(version - 1)
        stop.set()
        for each in asking:
            each.join(60)
        tokens, logprobs, _ = server.ask("actor")
        assert near(logprobs, trained.logprobs(PROMPT, tokens, adapter=False))
        assert not lost and not wrong and checked == 30
        assert server.version(OTHER) == 1
