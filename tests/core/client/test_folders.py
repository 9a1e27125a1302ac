"""Version folders travel through the store, with slime's and miles' hooks called as those call them."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tensorhub_plugins.core import (
    CHECKPOINT,
    Client,
    DeadlineExceeded,
    Server,
    TensorHubError,
    UsageError,
    VersionGone,
    VersionRefused,
    folders,
)
from tensorhub_plugins.core.protocol.messages import HOLDINGS_MAX

LISTED = f"{folders.LISTED}a-run"


class Host:
    """The hooks as processes of one host call them, with clients of their own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self._monkeypatch = folder, monkeypatch
        self._joined: dict[str, tuple[int, Client]] = {}
        self._run: dict[str, Any] = {}
        folder.mkdir()

    @contextmanager
    def _here(self) -> Iterator[None]:
        with self._monkeypatch.context() as patch:
            patch.setattr(folders, "_joined", self._joined)
            patch.setattr(folders, "_run", self._run)
            patch.setattr(folders.socket, "gethostname", lambda: self.folder.name)
            yield

    def write(self, number: int, files: dict[str, bytes], base: int | None = None) -> Path:
        made = self.folder / f"weight_v{number:06d}"
        described = {"metadata": {} if base is None else {"delta_encoding": "xor", "base_version": f"{base:06d}"}}
        for name, content in {**files, folders.INDEX: json.dumps(described).encode()}.items():
            path = made / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return made

    def publish(self, folder: Path, **args: Any) -> None:
        with self._here():
            folders.publish(SimpleNamespace(**args), str(folder), [])

    def fetch(self, number: int) -> None:
        with self._here():
            folders.fetch(str(self.folder), number)

    def serving(self, role: str) -> list[int]:
        return sorted({key.version for key in self._joined[role][1].serving()})

    def close(self) -> None:
        for _, client in self._joined.values():
            client.close()
        self._joined.clear()
        self._run.clear()


@pytest.fixture
def host(module_hub: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Host]]:
    with ExitStack() as stack:
        monkeypatch.setenv("TENSORHUB_HUB", module_hub.address)
        monkeypatch.setenv("TENSORHUB_RUN", tmp_path.name)

        def make(name: str) -> Host:
            made = Host(tmp_path / name, monkeypatch)
            stack.callback(made.close)
            return made

        yield make


def content(folder: Path) -> dict[str, bytes]:
    return {name: folder.joinpath(name).read_bytes() for name in folders._files(folder)}


def same(one: Host, other: Host, number: int) -> bool:
    name = f"weight_v{number:06d}"
    return content(one.folder / name) == content(other.folder / name) and len(content(one.folder / name)) > 0


def test_a_folder_arrives_without_a_shared_disk_and_goes_on_from_there(host: Callable[[str], Host]) -> None:
    trainer, near, far = host("trainer"), host("near"), host("far")
    trainer.publish(trainer.folder)  # a run begins
    made = trainer.write(1, {"model.safetensors": os.urandom(300_000), "deep/er/empty": b"", "one": b"1"})
    trainer.publish(made)
    near.fetch(1)
    assert same(near, trainer, 1)
    trainer.close()
    far.fetch(1)  # only `near` has it
    assert same(far, trainer, 1)
    (far.folder / "weight_v000001" / "one").write_bytes(b"2")
    assert not same(far, trainer, 1)  # the control


def test_a_folder_is_read_as_long_as_it_advances(host: Callable[[str], Host], monkeypatch: pytest.MonkeyPatch) -> None:
    """671B over 10 Gbit/s takes 20 minutes; ten are for it to appear."""
    grows: dict[bool, bool] = {}  # by whether only the tables are read
    fetch = Client.fetch

    def noted(client: Client, *named: Any, **how: Any) -> Any:
        grows[how.get("wanted") == ()] = how.get("grows", False)
        return fetch(client, *named, **how)

    monkeypatch.setattr(Client, "fetch", noted)
    trainer, reader = host("trainer"), host("reader")
    trainer.publish(trainer.write(1, {"a.safetensors": b"1"}))
    reader.fetch(1)
    assert grows == {True: False, False: True}


def test_a_late_host_gets_what_a_delta_builds_on_and_an_early_one_only_the_delta(host: Callable[[str], Host]) -> None:
    trainer, early, late = host("trainer"), host("early"), host("late")
    for number in (1, 2, 3):
        trainer.publish(trainer.write(number, {"d": os.urandom(1000 + number)}, base=number - 1))
        if number < 3:
            early.fetch(number)
    first = (early.folder / "weight_v000001").stat().st_ino
    early.fetch(3)
    late.fetch(3)
    assert all(same(each, trainer, number) for each in (early, late) for number in (1, 2, 3))
    assert (early.folder / "weight_v000001").stat().st_ino == first  # not read again
    assert trainer.serving("trainer") == [1, 2, 3] and early.serving("rollout") == [2, 3]
    whole = trainer.write(4, {"w": os.urandom(2000)})
    shutil.rmtree(trainer.folder / "weight_v000003")
    trainer.publish(whole)
    assert trainer.serving("trainer") == [4]  # 1 and 2 are over with it, 3 is deleted
    trainer.publish(trainer.write(5, {"w": os.urandom(2000)}))
    assert trainer.serving("trainer") == [4, 5]  # one may be in the middle of 4


def test_folders_of_another_run_are_replaced(host: Callable[[str], Host]) -> None:
    before, after, rollout = host("before"), host("after"), host("rollout")
    for number in (1, 2):
        before.publish(before.write(number, {"d": b"before%d" % number}, base=number - 1))
        rollout.fetch(number)
    before.close()
    for number in (1, 2):
        after.publish(after.write(number, {"d": b"after%d" % number}, base=number - 1))
    rollout.fetch(2)
    assert all(same(rollout, after, number) and not same(rollout, before, number) for number in (1, 2))


def test_what_the_trainer_wrote_on_this_host_is_left_alone(host: Callable[[str], Host]) -> None:
    trainer = host("trainer")
    made = trainer.write(1, {"w": b"123"})
    trainer.publish(made)
    inode = made.stat().st_ino
    trainer.fetch(1)
    assert made.stat().st_ino == inode and trainer.folder.joinpath(".tensorhub.lock").exists()
    assert not trainer.serving("rollout")  # nothing was read


@pytest.mark.parametrize("break_at", ["replace", "write_bytes"])
def test_a_host_that_fails_half_way_shows_no_folder_and_reads_it_again(
    break_at: str, host: Callable[[str], Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, rollout = host("trainer"), host("rollout")
    trainer.publish(trainer.write(1, {"w": os.urandom(1000)}))

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os if break_at == "replace" else Path, break_at, full)
        with pytest.raises(OSError, match="No space.*/files/" if break_at == "write_bytes" else "No space"):
            rollout.fetch(1)
    assert [each.name for each in rollout.folder.iterdir()] == [".tensorhub.lock"]
    rollout.fetch(1)
    assert same(rollout, trainer, 1)


@pytest.mark.parametrize("works", [True, False], ids=["it works", "it was stopped"])
def test_another_process_of_the_host_is_waited_for_as_long_as_it_works(
    works: bool, host: Callable[[str], Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, rollout = host("trainer"), host("rollout")
    trainer.publish(trainer.write(1, {"w": b"123"}))
    now = 0.0
    with open(rollout.folder / folders.LOCK, "ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)

        def sleep(_: float) -> None:
            nonlocal now
            now += folders.LOCK_POLL_S
            if works:
                os.utime(other.fileno(), ns=(0, int(now / folders.TIMEOUT_S * 4)))
            if now > 10 * folders.TIMEOUT_S:
                fcntl.flock(other, fcntl.LOCK_UN)

        monkeypatch.setattr(folders, "time", SimpleNamespace(sleep=sleep))
        if works:
            rollout.fetch(1)
        else:
            with pytest.raises(DeadlineExceeded, match=f"{folders.LOCK} stands still"):
                rollout.fetch(1)
    assert (now > 10 * folders.TIMEOUT_S) == works


def test_a_process_that_reads_touches_its_lock_and_no_fork_of_it_keeps_that(tmp_path: Path) -> None:
    lock, waits = tmp_path / folders.LOCK, iter([False, True])
    with folders._alone(tmp_path):
        assert "tensorhub-folder" in [thread.name for thread in threading.enumerate()]
        os.utime(lock, ns=(0, 0))
        with lock.open("ab") as file:
            folders._touch(file, SimpleNamespace(wait=lambda _: next(waits)))
        assert lock.stat().st_mtime_ns > 0
        fork = os.dup(next(fd for fd in map(int, os.listdir("/proc/self/fd")) if _leads_to(fd, tmp_path)))
    try:
        with folders._alone(tmp_path):
            pass
    finally:
        os.close(fork)


def test_who_was_stopped_itself_looks_again_before_it_gives_a_lock_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a suspension of the whole job the one that waits may be continued before the one that it waits for."""
    looks, clock = iter([False, False, True]), iter([0.0, 0.0, 10 * folders.TIMEOUT_S])
    monkeypatch.setattr(folders, "_locked", lambda _: next(looks))
    monkeypatch.setattr(folders, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda _: None))
    with folders._alone(tmp_path):
        pass


@pytest.mark.parametrize(("kept_s", "waits_s"), [(0.0, 600.0), (500.0, 100.0), (590.0, 60.0), (2000.0, 60.0)])
def test_the_processes_of_a_host_wait_together_for_a_version(
    kept_s: float, waits_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock has kept this one for so long. Each waited ten minutes more than the one before it."""
    now, until = 0.0, []

    @contextmanager
    def alone(_: Path) -> Iterator[None]:
        nonlocal now
        now += kept_s
        yield

    def visible(client: object, number: int, deadline: float) -> int:
        until.append(deadline - now)
        raise VersionGone("it is over", version=number)

    monkeypatch.setattr(folders, "_alone", alone)
    monkeypatch.setattr(folders, "_reader", lambda: None)
    monkeypatch.setattr(folders, "_visible", visible)
    monkeypatch.setattr(folders, "Deadline", SimpleNamespace(after=lambda seconds: now + seconds))
    with pytest.raises(VersionGone):
        folders.fetch(str(tmp_path), 1)
    assert until == [waits_s]


def test_two_containers_of_one_host_have_different_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the host's network they have its name; and each numbers its processes from 1."""
    names: list[str] = []
    monkeypatch.setenv("TENSORHUB_HUB", "tcp://127.0.0.1:1")
    monkeypatch.setattr(folders, "Client", lambda hub, *, replica, **_: names.append(replica))
    for _ in range(2):
        monkeypatch.setattr(folders, "_joined", {})
        folders._reader()
    assert len(set(names)) == 2


def _leads_to(fd: int, folder: Path) -> bool:
    return os.path.exists(f"/proc/self/fd/{fd}") and os.path.samefile(f"/proc/self/fd/{fd}", folder / folders.LOCK)


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"w": b"12"}, "no folder"),
        ({LISTED: b'{"w": 2}'}, "'w' is not as it was listed"),
        ({LISTED: b'{"../w": 2}', "../w": b"12"}, "no file of a folder"),
        ({LISTED: b'{"/tmp/w": 2}', "/tmp/w": b"12"}, "no file of a folder"),
    ],
)
def test_what_is_no_folder_is_refused_and_nothing_is_written(
    tensors: dict[str, bytes], says: str, host: Callable[[str], Host]
) -> None:
    rollout = host("rollout")
    with Client(os.environ["TENSORHUB_HUB"], run=os.environ["TENSORHUB_RUN"], model="actor", replica="liar") as liar:
        liar.publish(1, {k: torch.frombuffer(bytearray(v), dtype=torch.uint8) for k, v in tensors.items()}, CHECKPOINT)
        with pytest.raises(VersionRefused, match=says):
            rollout.fetch(1)
    assert [each.name for each in rollout.folder.iterdir()] == [".tensorhub.lock"]


def test_what_builds_on_a_version_that_is_over_is_an_error(host: Callable[[str], Host]) -> None:
    trainer, late = host("trainer"), host("late")
    trainer.publish(trainer.write(1, {"d": b"1"}, base=0))
    shutil.rmtree(trainer.folder / "weight_v000001")
    trainer.publish(trainer.write(2, {"d": b"2"}, base=1))
    with pytest.raises(TensorHubError, match="have the trainer write a whole checkpoint"):
        late.fetch(2)


@pytest.mark.timeout(60)
def test_a_version_that_was_withdrawn_is_not_waited_for(host: Callable[[str], Host]) -> None:
    """Whether it was the only one, the newest of several, or is followed by another."""
    trainer = host("trainer")
    for number in (1, 2, 3):
        trainer.publish(trainer.write(number, {"w": b"%d" % number}))
        trainer._joined["trainer"][1].withdraw(number)
        with pytest.raises(VersionGone, match=f"version {number} was withdrawn"):
            host(f"at-{number}").fetch(number)
    trainer.publish(trainer.write(4, {"w": b"4"}))
    host("later").fetch(4)
    with pytest.raises(VersionGone, match="version 3 was withdrawn.*have the trainer write a whole checkpoint"):
        host("last").fetch(3)


def test_a_host_keeps_the_last_two_whole_ones_and_each_of_its_processes_no_more(host: Callable[[str], Host]) -> None:
    """By whichever process of the host each of them was read."""
    trainer, one = host("trainer"), host("one")
    other = host("other")
    other.folder = one.folder
    for number in range(1, 6):
        trainer.publish(trainer.write(number, {"w": os.urandom(100 + number)}))
        for process in (one, other) if number % 2 else (other, one):
            process.fetch(number)
    assert sorted(path.name for path in one.folder.glob("weight_*")) == ["weight_v000004", "weight_v000005"]
    assert one.serving("rollout") == [5] and other.serving("rollout") == [4]
    assert len(list(trainer.folder.glob("weight_*"))) == 5
    trainer.publish(trainer.write(6, {"w": b"6"}), update_weight_disk_keep_files=False)
    assert [path.name for path in trainer.folder.glob("weight_*4")] == []  # slime deletes on one node only


def test_a_trainers_node_with_a_part_of_the_files_gets_the_others(host: Callable[[str], Host]) -> None:
    """So does a host with a former run's folder, or with a damaged one; what a killed process left is deleted."""
    trainer, node = host("trainer"), host("node")
    trainer.publish(trainer.write(1, {"a": b"1", "b": b"2"}))
    listed = next(path for path in trainer.folder.glob(f"weight_v000001/{folders.LISTED}*"))
    folders._list(node.write(1, {"a": b"1"}), listed.relative_to(trainer.folder / "weight_v000001").as_posix(), b"{}")
    node.folder.joinpath(".weight_v000001-killed").mkdir()
    node.fetch(1)
    assert same(node, trainer, 1)
    (node.folder / "weight_v000001" / "b").write_bytes(b"")
    assert not same(node, trainer, 1)  # the control
    node.fetch(1)
    assert same(node, trainer, 1) and not list(node.folder.glob(".weight*"))
    for path in node.folder.glob("weight_v000001/**/*"):  # as after a loss of power
        path.write_bytes(b"") if path.is_file() else None
    node.fetch(1)
    assert same(node, trainer, 1)


def test_a_late_host_has_no_more_deltas_in_memory_than_an_early_one(
    host: Callable[[str], Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, late = host("trainer"), host("late")
    for number in range(1, 9):
        trainer.publish(trainer.write(number, {"d": os.urandom(100 + number)}, base=number - 1))
    write, held = folders._write, list[int]()
    monkeypatch.setattr(folders, "_write", lambda *given: (held.append(len(late.serving("rollout"))), write(*given)))
    late.fetch(8)
    assert held == [1, 2, *[folders.KEPT + 1] * 6] and late.serving("rollout") == [7, 8]
    assert len(trainer.serving("trainer")) == 8  # the control


def test_of_deltas_without_end_the_newest_are_offered(host: Callable[[str], Host]) -> None:
    """As the hub takes so many of one worker: hosts that are there read on, one that is late is told why it can't."""
    trainer, early, late = host("trainer"), host("early"), host("late")
    for number in range(1, 8):
        made = trainer.write(number, {"d": os.urandom(100 + number)}, base=number - 1)
        trainer.publish(made, tensorhub_deltas_max=3)
        early.fetch(number)
        assert trainer.serving("trainer") == [*range(max(1, number - 2), number + 1)]
    assert same(early, trainer, 7) and len(list(trainer.folder.glob("weight_v*"))) == 7
    with pytest.raises(VersionGone, match="version 4 .*have the trainer write a whole checkpoint"):
        late.fetch(7)
    trainer.publish(trainer.write(8, {"d": b"8"}, base=7))
    assert trainer.serving("trainer") == [5, 6, 7, 8]  # the control
    assert folders.DELTAS_MAX < HOLDINGS_MAX


@pytest.mark.parametrize("how", ["in place", "another file", "cut off"])
def test_a_folder_on_offer_that_has_changed_is_refused(how: str, host: Callable[[str], Host]) -> None:
    trainer = host("trainer")
    made = trainer.write(1, {"w": b"1" * 1000})
    trainer.publish(made)
    trainer.publish(trainer.write(1, {"w": b"1" * 1000}))  # the control: the same was written again
    if how == "another file":
        (made / "w").unlink()
    (made / "w").write_bytes(b"2" * (10 if how == "cut off" else 1000))
    with pytest.raises(UsageError, match="takes a new number"):
        trainer.publish(made)
    trainer.publish(trainer.write(2, {"w": b"2"}))


def test_links_are_followed_and_one_that_leads_nowhere_is_refused(host: Callable[[str], Host], tmp_path: Path) -> None:
    trainer, rollout = host("trainer"), host("rollout")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    elsewhere.joinpath("vocabulary").write_bytes(b"words")
    made = trainer.write(1, {"w": b"1"})
    made.joinpath("tokenizer").symlink_to(elsewhere)
    made.joinpath("copy").symlink_to(elsewhere / "vocabulary")
    trainer.publish(made)
    rollout.fetch(1)
    assert same(rollout, trainer, 1)
    arrived = content(rollout.folder / "weight_v000001")
    assert arrived["tokenizer/vocabulary"] == arrived["copy"] == b"words"
    trainer.write(2, {"w": b"2"}).joinpath("gone").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="gone"):
        trainer.publish(trainer.folder / "weight_v000002")


def test_what_a_former_run_has_left_in_a_folder_is_not_of_this_run(host: Callable[[str], Host]) -> None:
    """Whether that run has written it or read it. A folder that was not written to is offered again as it is."""
    before, near, rollout = host("before"), host("near"), host("rollout")
    before.publish(before.write(1, {"a": b"1", "b": b"1"}))
    near.fetch(1)
    for each in (before, near):
        each.close()
        made = each.folder / "weight_v000001"
        each.publish(made)
        rollout.fetch(1)
        assert content(rollout.folder / "weight_v000001").keys() == {"a", "b", folders.INDEX}  # the control
        each.close()
        listed = max(path.stat().st_ctime_ns for path in made.glob(f"{folders.LISTED}*"))
        each.write(1, {"b": b"2"})
        while (made / "b").stat().st_ctime_ns <= listed or (made / folders.INDEX).stat().st_ctime_ns <= listed:
            each.write(1, {"b": b"2"})  # the clock of files is a coarse one
        each.publish(made)
        rollout.fetch(1)
        assert content(rollout.folder / "weight_v000001").keys() == {"b", folders.INDEX}
        each.close()


def test_a_file_whose_name_is_not_utf_8_is_refused_by_name(host: Callable[[str], Host]) -> None:
    trainer = host("trainer")
    trainer.publish(trainer.write(1, {"ol\u00e9": b"1"}))  # the control
    with pytest.raises(UsageError, match=r"weight_v000002 has a file 'ol\\udce9', whose name is not UTF-8: rename it"):
        trainer.publish(trainer.write(2, {os.fsdecode(b"ol\xe9"): b"1"}))
    assert trainer.serving("trainer") == [1]


@pytest.mark.parametrize(
    ("described", "says"),
    [
        ([], "is no index"),
        ({"metadata": None}, "is no index"),
        ({"metadata": {"delta_encoding": "xor"}}, "base_version"),
        ({"metadata": {"delta_encoding": "xor", "base_version": "000001"}}, "not an earlier one"),
    ],
)
def test_an_odd_index_is_refused_before_it_is_offered(described: Any, says: str, host: Callable[[str], Host]) -> None:
    trainer = host("trainer")
    made = trainer.write(1, {"w": b"1"})
    (made / folders.INDEX).write_text(json.dumps(described))
    with pytest.raises(UsageError, match=says):
        trainer.publish(made)


@pytest.mark.parametrize(
    "wrong", [{"release_train": True}, {"update_weight_local_checkpoint_dir": None}], ids=lambda wrong: min(wrong)
)
def test_options_with_which_nobody_would_read_are_refused(wrong: dict[str, Any], host: Callable[[str], Host]) -> None:
    trainer = host("trainer")
    made = trainer.write(1, {"w": b"1"})
    with pytest.raises(UsageError, match=r"release-train|local-checkpoint-dir"):
        trainer.publish(made, **wrong)


def test_without_a_hub_it_says_what_to_set(host: Callable[[str], Host], monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = host("trainer")
    monkeypatch.delenv("TENSORHUB_HUB")
    for call in (lambda: trainer.publish(trainer.write(1, {"w": b"1"})), lambda: host("rollout").fetch(1)):
        with pytest.raises(UsageError, match="set TENSORHUB_HUB"):
            call()


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
def test_each_rank_offers_what_it_sees(shared: bool, host: Callable[[str], Host], tmp_path: Path) -> None:
    """Two trainer nodes with disks of their own, or one: each file is offered once, and the folder arrives whole."""
    from torch_ranks import started

    rollout = host("rollout")
    nodes = [host("node-0"), host("node-0b" if not shared else "unused")]
    files = {f"model-{number}": os.urandom(1000) for number in range(5)}
    made = nodes[0].write(1, files if shared else {name: files[name] for name in list(files)[:3]})
    other = made if shared else nodes[1].write(1, {name: files[name] for name in list(files)[3:]})
    if not shared:
        (other / folders.INDEX).unlink()  # rank 0 alone writes it
    with started(__file__, 2, tmp_path / "meeting", 1, made.parent, other.parent):
        rollout.fetch(1)
    found = content(rollout.folder / "weight_v000001")
    assert {name: found[name] for name in files} == files and found.keys() == files.keys() | {folders.INDEX}


@pytest.mark.slow
def test_deltas_stay_where_one_node_has_the_index_and_another_no_file(
    host: Callable[[str], Host], tmp_path: Path
) -> None:
    from torch_ranks import await_version, started

    late, later, nodes = host("late"), host("later"), [host("node-0"), host("node-1")]
    for number in (1, 2, 3):
        nodes[0].write(number, {"model-0": os.urandom(100)}, base=number - 1)
    nodes[1].folder.joinpath("weight_v000001").mkdir()
    nodes[1].folder.joinpath("weight_v000001", "model-1").write_bytes(b"1")
    with started(__file__, 2, tmp_path / "meeting", 5, *(node.folder for node in nodes)) as ranks:
        with Client(os.environ["TENSORHUB_HUB"], run=os.environ["TENSORHUB_RUN"], model="actor", replica="x") as reader:
            await_version(reader, 3, ranks, 60)
            late.fetch(3)
            assert same(late, nodes[0], 3) and (late.folder / "weight_v000001" / "model-1").read_bytes() == b"1"
            nodes[1].fetch(3)  # an engine there: all files are on both nodes now
            for number in (4, 5):
                nodes[0].write(number, {"model-0": b"4"})
            for rank in ranks:
                print(file=rank.stdin, flush=True)
            await_version(reader, 5, ranks, 60)
        with pytest.raises(TensorHubError, match="have the trainer write a whole checkpoint"):  # the control
            later.fetch(1)


def _rank(rank: int, meeting: str, count: str, *disks: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    for number in range(1, int(count) + 1):
        if number == 4:
            sys.stdin.readline()
            folders.publish(None, f"{disks[rank]}/weight_v000003", [])  # once more
        folders.publish(None, f"{disks[rank]}/weight_v{number:06d}", [])
    sys.stdin.readline()


if __name__ == "__main__":
    _rank(int(sys.argv[1]), *sys.argv[2:])
