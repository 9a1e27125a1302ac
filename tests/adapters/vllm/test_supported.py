"""What an engine may not have, and is told before it joins: each would go wrong silently."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tensorhub_plugins.core import UsageError
from tensorhub_plugins.vllm import drafts
from tensorhub_plugins.vllm.config import WorkerConfig, parse
from tensorhub_plugins.vllm.worker import cpu, extension


@pytest.fixture(autouse=True)
def no_cpu_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "check_layers", lambda model, vllm_config: None)


def config(*, parallel: dict[str, Any] | None = None, **changes: Any) -> Any:
    settings = {"model_config": SimpleNamespace(quantization=None), "lora_config": None, "kv_transfer_config": None}
    settings["parallel_config"] = SimpleNamespace(**{"data_parallel_size": 1, **(parallel or {})})
    settings["load_config"] = SimpleNamespace(load_format="auto")
    return SimpleNamespace(**{**settings, "speculative_config": None, **changes})


def test_data_parallel_ranks_of_experts_may_follow_from_the_store() -> None:
    extension._check_supported(torch.nn.Module(), config(parallel={"data_parallel_size": 2}, **FROM_STORE))


OURS = SimpleNamespace(backend="tensorhub")
FROM_STORE = {"load_config": SimpleNamespace(load_format="tensorhub")}
KEPT_ELSEWHERE: list[tuple[dict[str, Any], str]] = [
    (
        {"kv_transfer_config": SimpleNamespace(kv_connector="LMCacheConnectorV1")},
        r"KV cache leaves this engine \(LMCacheConnectorV1\).*start without --kv-transfer-config",
    ),
    ({"ec_transfer_config": object()}, "start without --ec-transfer-config"),
]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"lora_config": object()}, "started for LoRA"),
        ({"parallel": {"enable_eplb": True}}, "switch enable_eplb off"),
        ({"parallel": {"prefill_context_parallel_size": 2}}, "prefill_context_parallel_size=1"),
        ({"parallel": {"data_parallel_size": 2}}, "--load-format tensorhub"),
        ({"parallel": {"data_parallel_size": 2}, "weight_transfer_config": OURS, **FROM_STORE}, "without --weight-tr"),
        ({"parallel": {"data_parallel_size": 2, "enable_elastic_ep": True}, **FROM_STORE}, "elastic expert par"),
        ({"model_config": SimpleNamespace(word_embeddings_untied_by_checkpoint=True)}, "tie_word_embeddings"),
        *KEPT_ELSEWHERE,
    ],
)
def test_what_would_go_wrong_silently_is_refused(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        extension._check_supported(torch.nn.Module(), config(**changed))


@pytest.mark.parametrize(("changed", "says"), KEPT_ELSEWHERE)
def test_what_keeps_results_of_an_adapter_is_refused_as_well(changed: dict[str, Any], says: str) -> None:
    started = config(lora_config=SimpleNamespace(max_cpu_loras=1), **changed)
    worker: Any = SimpleNamespace(model_runner=SimpleNamespace(get_model=torch.nn.Module), vllm_config=started)
    given = {"hub": "tcp://h:1", "run": "r", "model": "m", "replica": "e", "lora": ["a"]}
    with pytest.raises(UsageError, match=says):
        extension.TensorHubWorkerExtension.tensorhub_connect_adapters(worker, given)


@pytest.mark.parametrize(
    ("backend", "is_refused"), [("nccl", True), ("ipc", True), ("tensorhub", False), (None, False)]
)
@pytest.mark.parametrize("follow", ["now", None])
def test_nobody_else_changes_the_weights_of_an_engine_that_follows(
    backend: str | None, is_refused: bool, follow: str | None
) -> None:
    transfer = None if backend is None else SimpleNamespace(backend=backend)
    started = config(weight_transfer_config=transfer, instance_id="i")
    given = {"hub": "tcp://h:1", "model": "m"} | ({} if follow is None else {"follow": follow})
    if follow and is_refused:
        with pytest.raises(UsageError, match=f"back end '{backend}' would both change this engine's weights"):
            parse(given, started)
    else:
        assert parse(given, started)[0].follow == follow


UNREAD, READ = SimpleNamespace(load_format="dummy"), SimpleNamespace(load_format="auto")


@pytest.mark.parametrize(
    ("wanted", "method", "load_format", "source"),
    [
        (None, None, "dummy", None),
        (None, "ngram", "dummy", None),
        (None, "eagle3", "auto", "disk"),
        (None, "mtp", "auto", "disk"),
        ("store", "mtp", "auto", "store"),
        (None, "deepseek_mtp", "dummy", "store"),
        (None, "eagle3", "dummy", "would draft with random ones"),
        ("disk", "mtp", "dummy", "would draft with random ones"),
        ("store", "eagle", "auto", "no version holds the weights of another model"),
    ],
)
def test_where_a_draft_has_its_weights_from(wanted: Any, method: str | None, load_format: str, source: Any) -> None:
    speculative = SimpleNamespace(method=method, draft_load_config=SimpleNamespace(load_format=load_format))
    started = config(speculative_config=speculative, load_config=READ)
    if source is None or source in ("store", "disk"):
        assert drafts.source_in(started, wanted) == source
        speculative.draft_load_config, started.load_config = None, SimpleNamespace(load_format=load_format)
        assert drafts.source_in(started, wanted) == source  # it has the model's
    else:
        with pytest.raises(UsageError, match=source):
            drafts.source_in(started, wanted)


@pytest.mark.parametrize(("method", "says"), [("eagle3", "moves on"), ("mtp", 'draft="store" versions bring it')])
def test_a_draft_that_keeps_its_weights_is_said_to(method: str, says: str, caplog: pytest.LogCaptureFixture) -> None:
    started, drafting = config(speculative_config=SimpleNamespace(method=method), load_config=READ), torch.nn.Module()
    joining = WorkerConfig(hub="h", run="r", model="m", replica="e")
    with caplog.at_level(logging.WARNING):
        assert extension._followed_draft(joining, drafting, started) is None
    assert "keeps the weights it was started with" in caplog.text and says in caplog.text
    started.load_config = UNREAD
    if method == "mtp":
        assert extension._followed_draft(joining, drafting, started) is drafting
