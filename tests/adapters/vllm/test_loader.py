"""`--load-format tensorhub`: engines start from the store, with the bytes and answers of a start from disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("transformers")

from vllm_engines import Engine, EngineError, checkpoint

from tensorhub_plugins.core import CHECKPOINT, Client, Server

pytestmark = pytest.mark.heavy

TIMEOUT_S = 30.0


def client(hub: Server, name: str) -> Client:
    return Client(hub.address, run="default", model="actor", replica=name)


@contextmanager
def from_disk(model: Path) -> Iterator[Engine]:
    """The engine that the others are compared with."""
    options = {"load_format": "tensorhub", "model_loader_extra_config": {"disk": "only"}}
    with Engine(model, extension=None, **options) as engine:
        yield engine


def start(model: Path, hub: Server, **options: Any) -> Engine:
    extra = {"hub": hub.address, "model": "actor", **options.pop("extra", {})}
    settings = {"extension": None, "load_format": "tensorhub", "model_loader_extra_config": extra, **options}
    return Engine(model, **settings)


def runtime_digests(engine: Engine) -> list[dict[str, str]]:
    return [digests["runtime"] for digests in engine.ask("rpc", "tensorhub_digests", ())]


@pytest.mark.parametrize("kind", ["qwen2-tied", pytest.param("qwen2-untied", marks=pytest.mark.smoke), "mixtral"])
def test_engines_start_from_a_trainer_and_from_each_other(kind: str, models: Any, bare: Any, hub: Server) -> None:
    """The first converts the trainer's checkpoint, the second reads the first's live weights while it generates."""
    folder = bare(kind)
    with from_disk(models(kind, 2)) as reference, client(hub, "trainer") as trainer:
        expected = reference.generate()
        trainer.publish(1, checkpoint(models(kind, 2)))
        with start(folder, hub) as first:
            assert first.generate() == expected
            report = first.call("tensorhub_poll")["report"]
            assert report["layout"] == CHECKPOINT and list(report["sources"]) == ["trainer/0"]
            trainer.close()
            first.ask("submit", "long", [[5, 6]], 200)
            with start(folder, hub) as second:
                assert second.generate() == expected
                polled = second.call("tensorhub_poll")
                assert polled["version"] == 1 and polled["report"]["layout"] == polled["layout"]
                assert polled["report"]["sources"].keys().isdisjoint({"trainer/0"})
                assert runtime_digests(second) == runtime_digests(first)
                # Later versions arrive as in any other engine of the store.
                with client(hub, "trainer-2") as trainer:
                    trainer.publish(2, checkpoint(models(kind, 1)))
                    second.call("tensorhub_start_fetch", 2, TIMEOUT_S)
                    second.ask("pause")
                    assert install(second, 2)["installed"]
                    second.ask("resume")
                    assert second.generate() != expected


def install(engine: Engine, version: int) -> dict[str, Any]:
    while engine.call("tensorhub_poll")["state"] == "fetching":
        pass
    return engine.call("tensorhub_install", version, TIMEOUT_S)


def test_where_the_store_is_empty_the_first_reads_from_disk_and_serves_it(models: Any, bare: Any, hub: Server) -> None:
    model = models("qwen2-tied", 1)
    fallback = {"disk": "fallback", "disk_version": 1}
    with start(model, hub, extra=fallback) as first, client(hub, "reader") as reader:
        assert reader.wait(1, timeout_s=TIMEOUT_S) == 1
        assert first.call("tensorhub_poll")["report"] is None
        with start(bare("qwen2-tied"), hub, extra=fallback) as second:
            assert second.call("tensorhub_poll")["report"]["layout"].startswith("runtime:")
            assert second.generate() == first.generate()
            assert runtime_digests(second) == runtime_digests(first)


def test_what_cannot_start_says_why(models: Any, bare: Any, hub: Server) -> None:
    folder = bare("qwen2-tied")
    for extra, sentence in (
        ({"start_timeout_s": 0.3}, "NotPublished"),
        ({"hubb": "tcp://127.0.0.1:1"}, "model_loader_extra_config has no option 'hubb': did you mean 'hub'?"),
        ({"disk": "sometimes"}, "option disk is 'sometimes': choose one of never, fallback, only"),
        ({"hub": "tcp://127.0.0.1:9", "connect_timeout_s": 0.2}, "HubUnreachable"),
    ):
        with pytest.raises(EngineError) as refused:
            start(folder, hub, extra=extra)
        assert sentence in str(refused.value)


@pytest.mark.smoke
def test_a_sleeping_engine_is_no_source_and_comes_back(models: Any, bare: Any, hub: Server) -> None:
    with client(hub, "trainer") as trainer:
        trainer.publish(1, checkpoint(models("qwen2-tied", 1)))
        faulty = {"extension": "vllm_faults.FaultyExtension", "extra": {"replica": "rollout-0"}}
        with start(bare("qwen2-tied"), hub, **faulty) as engine:
            layout = engine.call("tensorhub_poll")["layout"]
            with start(bare("qwen2-tied"), hub, extra={"replica": "rollout-1"}), client(hub, "reader") as reader:
                expected = engine.generate()
                before = runtime_digests(engine)

                def holders() -> tuple[str, ...]:
                    from tensorhub_plugins.core.cli import fetch_status

                    (model,) = fetch_status(hub.address)["models"]
                    return tuple(model["versions"][-1]["layouts"].get(layout, ()))

                assert "rollout-0/0" in holders()
                engine.ask("rpc", "sleep", (1,))
                assert holders() == ("rollout-1/0",)
                with pytest.raises(EngineError, match="sleeps and its weights are not there"):
                    engine.call("tensorhub_start_fetch", 2, 1.0)
                copy = reader.fetch(1, (layout,), timeout_s=TIMEOUT_S)
                assert list(copy.report.sources) == ["rollout-1/0"]
                engine.ask("rpc", "wake_up", ())
                while engine.call("tensorhub_poll")["serving"]:
                    pass
                assert "rollout-0/0" in holders()
                assert runtime_digests(engine) == before and engine.generate() == expected
                # The negative control: without our hook vLLM says nothing, and peers would read what is gone.
                engine.call("tensorhub_test_unhook", "sleep")
                engine.ask("rpc", "sleep", (1,))
                assert "rollout-0/0" in holders()


@pytest.mark.long
@pytest.mark.timeout(240)  # vLLM starts processes that import it anew
def test_two_workers_start_each_from_its_own_shard(models: Any, bare: Any, hub: Server) -> None:
    two_cores = {"workers": 2, "env": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}}
    with client(hub, "trainer") as trainer:
        trainer.publish(1, checkpoint(models("qwen2-tied", 2)))
        with start(bare("qwen2-tied"), hub, **two_cores) as first:
            expected = first.generate()
            trainer.close()
            with start(bare("qwen2-tied"), hub, **two_cores) as second:
                layouts = [polled["report"]["layout"] for polled in second.ask("rpc", "tensorhub_poll", ())]
                assert len(set(layouts)) == 1 and layouts[0].startswith("runtime:")
                assert runtime_digests(second) == runtime_digests(first)
                assert second.generate() == expected
