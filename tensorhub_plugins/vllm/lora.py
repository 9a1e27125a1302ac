"""LoRA adapters as versions: what a trainer publishes, and what an engine reads of it.

Needs no vLLM; and, to tell what a run will do, no torch.

An adapter is a history of its own, under a model name of its own: its tensors as PEFT names them, and its configuration
as one more tensor of bytes. Only the trainer publishes it; core knows nothing of it.

    publisher.publish(step, adapter_tensors(peft_model).items())         trainer: Publisher(model="actor.lora", ...)
    {"lora": "actor.lora"}                                               engine: see config.WorkerConfig

The configuration also says how many tensors the adapter has and what its base model is: one that came in part, or that
belongs to another base, is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, cast

from tensorhub_plugins.core import UsageError, VersionRefused
from tensorhub_plugins.vllm.model_facts import facts_of
from tensorhub_plugins.vllm.names import adapter_id
from tensorhub_plugins.vllm.plugin import around

if TYPE_CHECKING:
    import torch

    from tensorhub_plugins.core import Held

CONFIG = "adapter_config.json"  # also the name of its tensor, uint8 of shape (length of the JSON text,)
COUNT, BASE = "tensorhub_tensors", "tensorhub_base"  # what is added to the configuration
PATH = "/tensorhub/"  # of an adapter in vLLM's requests; nothing is on any disk there
DEFAULT = ".default"  # the adapter's name, in those of a model's tensors
SUFFIX = ".lora"  # of the history's name, after that of the model
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM takes as max_lora_rank
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # initial values that PEFT also takes from the base
# Settings of PEFT that compute something else from the same matrices, or have another base; vLLM ignores them.
OTHER_KINDS = (
    "alora_invocation_tokens", "use_qalora", "use_bdlora", "monteclora_config", "arrow_config", "kasa_config",
    "layer_replication",
)  # fmt: skip


def history_of(model: str) -> str:
    """Return the name of the history of a framework's only adapter. model: as the run calls it."""
    return f"{model.removesuffix(SUFFIX)}{SUFFIX}"


def adapter_tensors(
    adapter: Any, config: Mapping[str, Any] | None = None, *, name: str = "default"
) -> dict[str, torch.Tensor]:
    """Return what a trainer publishes of an adapter: its tensors, and its configuration as one more, uint8 on the CPU.

    adapter: a PEFT model, of which the adapter `name` is taken; or its state dict as `get_peft_model_state_dict`
    returns it, with `config`: the fields of its LoraConfig. The tensors are the given ones, not copies. Raise
    UsageError for what is no LoRA adapter, or one that no engine could apply to the base model as it was."""
    base: dict[str, Any] = {}
    if not isinstance(adapter, Mapping):
        if not hasattr(adapter, "peft_config"):
            raise UsageError(f"adapter is a {type(adapter).__name__}: pass a PEFT model, or its state dict")
        if name not in adapter.peft_config:
            raise UsageError(f"the PEFT model has no adapter {name!r}: it has {', '.join(adapter.peft_config)}")
        from peft import get_peft_model_state_dict

        base = facts_of(adapter.get_base_model().config) if hasattr(adapter, "get_base_model") else {}
        config = adapter.peft_config[name].to_dict() if config is None else config
        adapter = get_peft_model_state_dict(adapter, adapter_name=name, save_embedding_layers=False)
    if config is None:
        raise UsageError("a state dict does not say its rank and scaling: pass config, the fields of its LoraConfig")
    if CONFIG in adapter or not adapter:
        raise UsageError(f"the adapter has no tensors, or one called {CONFIG}: pass what PEFT saves of it")
    _check_kind(config)
    said = {**config, COUNT: len(adapter), **({BASE: base} if base else {})}
    return {**adapter, CONFIG: _bytes_of(json.dumps(said, sort_keys=True, default=_plain))}


def adapter_parts(model: Any, held: Iterable[Held], rank: int) -> Iterator[Held]:
    """Yield what this rank publishes of the adapter of a sharded PEFT model: its part of each of `adapter_tensors`.

    held: of all the model's tensors, under the model's names, as `fsdp1_parts` and `fsdp2_parts` make them. Nothing is
    gathered. The first rank publishes the configuration, which stays that of the first call: a model that is saved may
    say other things of itself afterwards. Errors as of `adapter_tensors`."""
    from tensorhub_plugins.core import Held, contiguous_spec

    # PEFT itself finds nothing in a model that FSDP1 wraps: its modules have other names there.
    ours = {name.replace(DEFAULT, ""): one for one in held if ".lora_" in (name := one.whole.name) and DEFAULT in name}
    said = vars(model).get("tensorhub_adapter")
    if said is None:
        base = facts_of(model.get_base_model().config)
        own = {"base_model_name_or_path": "", **({BASE: base} if base else {})}  # no folder of this node
        config = {**model.peft_config["default"].to_dict(), **own}
        said = vars(model)["tensorhub_adapter"] = adapter_tensors(cast(Any, ours), config)[CONFIG]
    yield from (one.named(name) for name, one in ours.items())
    yield Held(contiguous_spec(CONFIG, said.dtype, said.shape), said if rank == 0 else None)


def adapter_of(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors of an adapter that was published, and its configuration. Raise VersionRefused for one that is
    not whole, and for what is no adapter."""
    from tensorhub_plugins.core import flat_bytes, on_host

    adapter = dict(tensors)
    text = adapter.pop(CONFIG, None)
    if text is None:
        raise VersionRefused(f"no tensor is called {CONFIG}: this is no adapter; publish `adapter_tensors(...)` of one")
    try:
        config = json.loads(bytes(on_host(flat_bytes(text)).numpy()))
        if not isinstance(config, dict) or not isinstance(config.get(BASE, {}), dict):
            raise ValueError(f"it, or its {BASE}, is another value: {config!r:.80}")
    except (ValueError, TypeError, RecursionError) as error:
        raise VersionRefused(f"{CONFIG} of the adapter is no JSON object: {error}") from error
    if config.get(COUNT, len(adapter)) != len(adapter):
        raise VersionRefused(f"the adapter came in part: {len(adapter)} of its {config[COUNT]} tensors were published")
    try:
        _check_kind(config)
    except UsageError as error:
        raise VersionRefused(error.message) from error
    return adapter, config


def lora_request(name: str) -> Any:
    """Return vLLM's LoRARequest for this adapter of the store, for `LLM.generate` and AsyncLLM."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, adapter_id(name), f"{PATH}{name}")


def for_adapter(generate: Callable[..., Any], name: str, is_there: Callable[[], bool]) -> Callable[..., Any]:
    """Return AsyncLLM's `generate` for this adapter of the store. is_there: whether the engine has a version of it;
    without one, requests are for the weights alone."""
    request = lora_request(name)

    @wraps(generate)
    def generate_with(*args: Any, **given: Any) -> Any:
        return generate(*args, **{**given, "lora_request": request if is_there() else None})

    return generate_with


def engine_arguments(rank: int) -> dict[str, Any]:
    """Return what vLLM's engines are started with for one adapter of this rank, 1 to the last of RANKS."""
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": next(each for each in RANKS if each >= rank)}


def offer(models: Any, vllm_config: Any) -> None:
    """Have a server offer all adapters that its engine takes from the store. models: vLLM's OpenAIServingModels. Raise
    UsageError where the weights without an adapter would answer under the name of one."""
    from tensorhub_plugins.vllm.config import parse

    _, joining = parse(vllm_config.load_config.model_loader_extra_config, vllm_config)
    names = () if joining is None else joining.lora
    taken = [name for name in names if models.is_base_model(name)]
    if taken:
        raise UsageError(
            f"requests for {taken[0]!r} would be answered without the adapter, for the base model is served under that "
            "name, too: give another --served-model-name"
        )
    models.lora_requests.update({name: lora_request(name) for name in names})
    for change in ("load_lora_adapter", "unload_lora_adapter") if names else ():
        around(models, change, partial(_unless_ours, names))


async def _unless_ours(names: Collection[str], original: Callable[..., Any], request: Any, **given: Any) -> Any:
    """Wrap vLLM's routes that replace an adapter while the server runs: files would answer under the name, and with the
    version, of the store's."""
    if request.lora_name in names:
        from fastapi import HTTPException

        raise HTTPException(
            409, f"adapter {request.lora_name!r} comes from the store: publish a version, or pin another"
        )
    return await original(request, **given)


def _check_kind(config: Mapping[str, Any]) -> None:
    """Raise UsageError for an adapter that engines cannot apply, and would not say so."""
    kind = _text(config.get("peft_type") or "LORA")
    if kind.upper() != "LORA":
        raise UsageError(f"the adapter is of PEFT's type {kind}: engines apply LORA only")
    others = [name for name in OTHER_KINDS if config.get(name)]
    if others:
        raise UsageError(f"the adapter has {', '.join(others)}, which engines do not apply: train without")
    begins = _text(config.get("init_lora_weights", "")).lower()
    if begins.startswith(CHANGES_BASE):
        raise UsageError(
            f"init_lora_weights={begins!r} changes the base weights, which engines keep as they are: use another "
            "initialization, or publish merged weights"
        )


def _text(value: Any) -> str:
    return str(getattr(value, "value", value))


def _plain(value: Any) -> Any:
    """Convert what PEFT's configurations hold besides JSON's types: sets, and enums and dtypes as text."""
    return sorted(value, key=str) if isinstance(value, (set, frozenset)) else _text(value)


def _bytes_of(text: str) -> torch.Tensor:
    import torch

    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
