"""OpenRLHF saves and loads with DeepSpeed, and the weights come from the store: two real ranks, which are killed.

The checkpoint's weights are replaced by others before the second start, so that what is in the parameters shows where
it came from. First OpenRLHF's own policy actors without Ray and engines, then whole runs.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("openrlhf", reason="needs OpenRLHF's environment (make test-openrlhf)")
torch = pytest.importorskip("torch")

from openrlhf_run import RUN_TIMEOUT_S, Run  # noqa: E402
from torch_ranks import ROOT, await_version, started  # noqa: E402

from recipes.ranks import free_port  # noqa: E402
from tensorhub_plugins.core import Client, start_server, version_of  # noqa: E402

RANKS = 2
SAVED, LAST = 2, 3  # steps
TAG = f"global_step{SAVED}"
READ = "read\n"
TIMEOUT_S = 600  # the first run compiles DeepSpeed's extensions
pytestmark = [pytest.mark.heavy, pytest.mark.timeout(3 * TIMEOUT_S)]


def policy(rank: int, port: str, address: str, folder: Path, stage: str, mode: str):
    """OpenRLHF's actor of one rank, as its driver makes it."""
    from openrlhf.utils import get_strategy

    from tensorhub_plugins.openrlhf import doctor, policy_ranks

    backend = f"tensorhub{address.removeprefix('tcp')}?run=r&recover_weights={mode}&timeout_s=20"
    args = doctor.parse(
        [
            *("--actor.model_name_or_path", str(folder / "model"), "--vllm.sync_backend", backend),
            *("--ckpt.path", str(folder), "--ckpt.load_enable", "--ds.zero_stage", stage),
            *("--train.batch_size", str(RANKS), "--train.micro_batch_size", "1", "--actor.adam.lr", "0.01"),
            *("--ds.attn_implementation", "eager", "--vllm.num_engines", "1"),
            *("--data.prompt_dataset", "none", "--reward.remote_url", "http://none"),
        ]
    )
    strategy = get_strategy(args)
    actor = policy_ranks.PolicyModelActor(RANKS, rank, "127.0.0.1", int(port))
    actor.init_model_from_pretrained(strategy, args.actor.model_name_or_path, max_steps=100)
    return actor


def train(actor, rank: int) -> None:
    engine = actor.actor.model
    engine.backward(engine(torch.arange(8).view(1, 8)).logits.float().pow(2).mean() * (rank + 1))
    engine.step()


def weights_of(actor) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in actor._gathered()}


def masters_of(actor) -> list[torch.Tensor]:
    optimizer = actor.actor.model.optimizer
    groups = optimizer.fp32_partitioned_groups_flat if is_cut(optimizer) else optimizer.single_partition_of_fp32_groups
    return [master.clone() for master in groups]


def is_cut(optimizer) -> bool:
    """Whether it is ZeRO-3's."""
    return hasattr(optimizer, "fp32_partitioned_groups_flat")


def main(rank: int, port: str, start: str, address: str, folder: Path, stage: str, mode: str) -> None:
    actor = policy(rank, port, address, folder, stage, mode)
    states = actor.get_checkpoint_states()
    if start == "first":
        assert not states
        actor.tensorhub_begin(0)
        for step in range(SAVED - 1, LAST + 1):
            train(actor, rank)
            actor.tensorhub_publish(step)
            torch.save(weights_of(actor), folder / f"{step}.{rank}")
            if step == SAVED:  # as OpenRLHF does, after the update
                actor.save_checkpoint(TAG, {"global_step": step, "data_loader_state_dict": {"seed": torch.tensor(7)}})
                torch.save(masters_of(actor), folder / f"masters.{rank}")
            assert sys.stdin.readline() == READ
        os.kill(os.getpid(), signal.SIGKILL)
    assert states["global_step"] == SAVED and int(states["data_loader_state_dict"]["seed"]) == 7
    optimizer = actor.actor.model.optimizer
    if is_cut(optimizer):
        halves = optimizer.fp16_partitioned_groups_flat
    else:
        halves = [parts[rank] for parts in optimizer.parallel_partitioned_bit16_groups]
    halves = [each.clone() for each in halves]
    torch.save((weights_of(actor), masters_of(actor), halves), folder / f"found.{rank}")
    assert {int(each["step"]) for each in optimizer.optimizer.state.values()} == {SAVED}
    actor.tensorhub_begin(SAVED - 1)
    actor.tensorhub_publish(SAVED)
    train(actor, rank)  # and the training goes on
    actor.tensorhub_publish(SAVED + 1)
    torch.distributed.barrier()
    os._exit(0)


def replace_weights(folder: Path) -> None:
    """Write other weights into the checkpoint's model, and not into its masters; nothing shows from outside."""
    for path in folder.glob("_actor/*/*model_states.pt"):
        times = path.stat()
        state = torch.load(path, weights_only=False)
        for tensor in state["module"].values():
            tensor.fill_(0.5)
        torch.save(state, path)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: Path) -> None:
    if not torch.cuda.is_available():
        monkeypatch.setenv("OUT", str(shared))
        script = f". {ROOT}/recipes/cpu/openrlhf_environment.sh; env -0"
        for line in subprocess.check_output(["bash", "-c", script], text=True).split("\0")[:-1]:
            name, _, value = line.partition("=")
            monkeypatch.setenv(name, value)
    command = [ROOT / "recipes/verl_grpo/make_model.py", tmp_path / "model", "--size", "tiny"]
    subprocess.run([sys.executable, *map(str, command)], check=True, timeout=TIMEOUT_S)


@pytest.mark.parametrize(
    ("stage", "mode", "lost", "step"),
    [
        ("2", "resumed_step", "", SAVED),
        ("1", "resumed_step", "", SAVED),
        ("2", "latest", "", LAST),
        ("2", "latest", "the newer", SAVED),
        ("3", "latest", "", LAST),
        ("3", "latest", "the newer", SAVED),
        ("2", "resumed_step", "a note", None),
        ("2", "off", "", None),
    ],
)
@pytest.mark.usefixtures("model")
def test_the_weights_come_from_the_store(tmp_path: Path, stage: str, mode: str, lost: str, step: int | None) -> None:
    common = (tmp_path, stage, mode)
    with start_server() as server, Client(server.address, run="r", model="actor", replica="keeper") as keeper:
        with started(__file__, RANKS, free_port(), "first", server.address, *common) as ranks:
            for number in range(SAVED - 1, LAST + 1):
                await_version(keeper, number, ranks, TIMEOUT_S)
                keeper.fetch(number, serve=True)
                for rank in ranks:
                    rank.stdin.write(READ)
                    rank.stdin.flush()
            assert [rank.wait(TIMEOUT_S) for rank in ranks] == [-signal.SIGKILL] * RANKS
        if not all(tensor.isfinite().all() for tensor in torch.load(tmp_path / f"{LAST}.0").values()):
            pytest.skip("DeepSpeed has trained to NaN, as its ZeRO-3 does here in some runs: nothing to compare")
        replace_weights(tmp_path)
        if lost == "a note":
            (tmp_path / "_actor" / TAG / "tensorhub_rank_1.json").unlink()
        for key in keeper.serving():
            if lost == "the newer" and key.version > SAVED:
                keeper.withdraw(key.version)
        with started(__file__, RANKS, free_port(), "second", server.address, *common) as ranks:
            assert [rank.wait(TIMEOUT_S) for rank in ranks] == [0] * RANKS
    for rank in range(RANKS):
        weights, masters, halves = torch.load(tmp_path / f"found.{rank}")
        saved = torch.load(tmp_path / f"masters.{rank}")
        exact = all(map(torch.equal, masters, saved))
        fit = all(torch.equal(master.bfloat16(), half) for master, half in zip(masters, halves, strict=True))
        assert exact == (step != LAST)  # those of the checkpoint, unless the weights are newer
        assert fit == (step is not None)  # of the weights that are in place
        if step is None:
            assert all(tensor.eq(0.5).all() for tensor in weights.values())
            continue
        for number in (SAVED, LAST):
            expected = torch.load(tmp_path / f"{number}.{rank}")
            assert expected.keys() == weights.keys()
            assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items()) == (number == step)


def trainer_of(run: Run) -> int | None:
    """Return the process of a trainer rank that has published."""
    for path in (run.folder / "events").glob("*.jsonl"):
        if '"event": "publish", "worker": "trainer/1"' in path.read_text():
            return int(path.stem.rpartition("-")[2])
    return None


def saved(run: Run) -> int:
    latest = run.folder / "checkpoints" / "_actor" / "latest"
    noted = latest.exists() and list(latest.with_name(latest.read_text()).glob("tensorhub_rank_*.json"))
    return int(latest.read_text().removeprefix("global_step")) if noted and len(noted) == RANKS else 0


@pytest.mark.long
@pytest.mark.timeout(3 * RUN_TIMEOUT_S)
def test_a_run_that_lost_a_rank_takes_its_weights_from_the_store(tmp_path: Path, shared: Path) -> None:
    """The third run is the control: without the option the weights are those that were written into the checkpoint."""
    arguments = ["--data.max_samples", "4000", "--actor.num_gpus_per_node", "2", "--ckpt.save_steps", str(SAVED)]

    def run(number: int, mode: str, *more: str) -> Run:
        hub = f"tensorhub{server.address.removeprefix('tcp')}?run=r&recover_weights={mode}&engine_timeout_s=300"
        what = ("openrlhf_grpo", "sync", "tensorhub", *arguments, *more)
        return Run(tmp_path / str(number), shared, *what, hub=hub, ENGINES="1")

    def weights(version: int) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in keeper.fetch(version, serve=True).tensors().items()}

    with start_server() as server, Client(server.address, run="r", model="actor", replica="keeper") as keeper:
        with run(1, "resumed_step") as first:
            pid = first.wait_for(lambda: trainer_of(first))
            step = first.wait_for(lambda: saved(first))
            expected = weights(step)
            os.kill(pid, signal.SIGKILL)
            assert first.process.wait(RUN_TIMEOUT_S) != 0
        checkpoints = tmp_path / "1" / "checkpoints"
        (checkpoints / "_actor" / "latest").write_text(f"global_step{step}")  # it may have saved once more
        replace_weights(checkpoints)
        copy = shutil.copytree(checkpoints, tmp_path / "checkpoints")
        for number, mode, path in ((2, "resumed_step", checkpoints), (3, "off", copy)):
            with run(number, mode, "--ckpt.load_enable", "--ckpt.path", str(path)) as resumed:
                new = version_of(number - 1, step)
                resumed.wait_for(lambda run=resumed: run.events("publish"))
                found = weights(new)
                resumed.wait_for(lambda run=resumed: len(run.events("publish")) > RANKS)
            same = all(torch.equal(found[name], tensor) for name, tensor in expected.items())
            others = all(tensor.eq(0.5).all() for tensor in found.values())
            assert (same, others) == (number == 2, number == 3)
            fetched = [each["version"] for each in resumed.events("fetch") if each["worker"].startswith("trainer/")]
            assert fetched == [step] * RANKS * (number == 2)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:5], Path(sys.argv[5]), *sys.argv[6:8])
