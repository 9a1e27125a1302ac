"""A server of a model that sees images: whoever sends an image again after an update gets an answer, and the new one.

vLLM keeps the preprocessed images twice, in the server and in the engine core, and sends those that both have only
once: what an update makes one of them forget, the other must forget, too. BLIP-2, because the processors of most other
models need torchvision, which the CPU environments lack.
"""

from __future__ import annotations

import base64
import io
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("transformers.core_model_loading", reason="needs transformers 5")
pytest.importorskip("requests")

import requests
import torch
import transformers
from vllm_engines import wait_until
from vllm_servers import Server, serving

from recipes.verl_grpo.make_model import make_tokenizer
from tensorhub_plugins.core import CHECKPOINT, Client, start_server
from tensorhub_plugins.vllm import checkpoint_tensors

pytestmark = [pytest.mark.heavy, pytest.mark.long, pytest.mark.timeout(900)]

PIXELS = 32  # a side
TOKENS = 16
TEMPLATE = "{% for m in messages %}{% for part in m['content'] %}{{ part['text'] or '' }}{% endfor %}{% endfor %}"


def make(seed: int, folder: Path) -> Any:
    """A tiny model of random weights, whose answers depend on the image."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["\n", "<|im_end|>", "<image>"]})
    tokens = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {"model_type": "opt", "hidden_size": 128, "word_embed_proj_dim": 128, "ffn_dim": 256, "init_std": 0.2}
    text |= {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 512, **tokens}
    config = transformers.Blip2Config(
        vision_config={**shape, "image_size": PIXELS, "patch_size": 8, "initializer_range": 0.2},
        qformer_config={**shape, "encoder_hidden_size": 64, "vocab_size": 100, "initializer_range": 0.2},
        text_config={**text, "vocab_size": len(tokenizer)},
        num_query_tokens=4,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    model = transformers.Blip2ForConditionalGeneration(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:  # norms of ones and biases of zeros would hide a tensor that was not updated
            torch.nn.init.normal_(parameter, mean=1.0, std=0.2)
        elif not name.startswith("language_model"):  # what the image has to say is heard
            torch.nn.init.normal_(parameter, std=0.6)
    model.to(torch.bfloat16).save_pretrained(folder)
    images = transformers.BlipImageProcessor(size={"height": PIXELS, "width": PIXELS})
    transformers.Blip2Processor(images, tokenizer, num_query_tokens=4, chat_template=TEMPLATE).save_pretrained(folder)
    return model


def picture(seed: int) -> str:
    """Noise, as a PNG in a URL."""
    noise = torch.randint(0, 256, (PIXELS, 3 * PIXELS), generator=torch.Generator().manual_seed(seed))
    rows = b"".join(b"\0" + bytes(row.tolist()) for row in noise)
    file = io.BytesIO(b"\x89PNG\r\n\x1a\n")
    file.seek(0, io.SEEK_END)
    header = struct.pack(">IIBBBBB", PIXELS, PIXELS, 8, 2, 0, 0, 0)
    for kind, data in ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")):
        file.write(struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)))
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def ask(server: Server, url: str) -> requests.Response:
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what is this?"}]
    body = {"model": "actor", "messages": [{"role": "user", "content": content}], "max_tokens": TOKENS}
    more = {"temperature": 0, "ignore_eos": True, "return_token_ids": True, "logprobs": True}
    return server.post("v1/chat/completions", {**body, **more})


def answer(server: Server, url: str) -> tuple[list[int], list[float]]:
    """Tokens and their log-probabilities, which tell any two images and weights apart."""
    reply = ask(server, url)
    assert reply.status_code == 200, reply.text
    choice = reply.json()["choices"][0]
    assert len(choice["token_ids"]) == TOKENS
    return choice["token_ids"], [token["logprob"] for token in choice["logprobs"]["content"]]


def test_an_image_that_was_seen_before_an_update_is_answered_after_it(tmp_path: Path) -> None:
    models = [make(seed, tmp_path / f"model-{seed}") for seed in (1, 2)]
    images = [picture(seed) for seed in range(3)]
    with start_server() as hub, Client(hub.address, run="default", model="actor", replica="trainer") as trainer:
        trainer.publish(1, checkpoint_tensors(models[0]))
        extra = {"hub": hub.address, "model": "actor", "replica": "server", "follow": "now"}
        with serving(tmp_path / "model-1", tmp_path, extra) as server:
            old = [answer(server, image) for image in images[:2]]
            assert old[0] != old[1], "the image makes no difference"
            assert [answer(server, image) for image in images[:2]] == old  # now the caches have them

            update(trainer, 2, models[1])
            new = [answer(server, image) for image in images]  # two that were seen, one that was not
            assert new[0] != new[1] and not any(each in old for each in new)
            assert [answer(server, image) for image in images] == new

            # With the weights from before the answers are those from before: nothing that was computed is kept.
            update(trainer, 3, models[0])
            assert [answer(server, image) for image in images[:2]] == old


def update(trainer: Client, version: int, model: Any) -> None:
    """Returns when the server has it."""
    trainer.publish(version, checkpoint_tensors(model))

    def taken() -> bool:
        return any(
            layout != CHECKPOINT for info in trainer.versions() if info.version == version for layout in info.layouts
        )

    wait_until(taken, f"version {version} is taken", 90)
