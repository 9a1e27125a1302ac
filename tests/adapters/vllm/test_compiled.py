"""What an engine compiles travels with its weights; real engines with torch.compile at the end."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from client_stage import until

from tensorhub_plugins.core import Client, Keys, UsageError, VersionRefused, new_secret
from tensorhub_plugins.core.cli import fetch_status
from tensorhub_plugins.core.hub.server import Server, start_server
from tensorhub_plugins.core.operations import problems
from tensorhub_plugins.vllm.config import WorkerConfig
from tensorhub_plugins.vllm.engine import compiled
from tensorhub_plugins.vllm.engine.compiled import Compiled

ROOT = Path(__file__).resolve().parents[3]
WAIT_S = 30.0
KEYS = new_secret()


started: list[Engine] = []


def end_all() -> None:
    while started:
        started.pop().compiled.close()
    until(lambda: all(thread.name != "tensorhub-compiled" for thread in threading.enumerate()))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("TENSORHUB_SECRET", KEYS.text())
    with start_server(keys=KEYS) as server:
        yield server
        end_all()


class Engine:
    """An engine of a host of its own. Its compiler writes a file for each name."""

    def __init__(self, server: Server, root: Path, name: str, *, kind: str = "kind", option: str = "auto") -> None:
        self.folders = {"compile": root / name / "compile", "triton": root / name / "triton"}
        self.joining = WorkerConfig.parse(
            {"hub": server.address, "run": "r", "model": "actor", "replica": name, "compile_cache": option}
        )
        self.compiled = Compiled(lambda: kind, self.folders)
        self.compiles = 0
        started.append(self)

    def starts(self, *names: str, later: bool = False, again: bool = False) -> Engine:
        if not again:
            self.compiled.bring(lambda: None if later else self.joining)
        for name in names:
            part, _, rest = name.partition("/")
            path = self.folders[part] / rest
            if not path.exists():
                self.compiles += 1
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(f"code of {name}")
        self.compiled.offer(self.joining)
        return self


def offered(server: Server, kind: str = "kind") -> int:
    """Return the newest version of what engines of this kind have compiled."""
    for model in fetch_status(server.address, keys=KEYS)["models"]:
        if model["model"] == f"actor.compiled-{kind}":
            return max((version["version"] for version in model["versions"]), default=0)
    return 0


NAMES = ("compile/torch_aot_compile/ab/rank_0_0/model", "compile/ab/inductor_cache/x.so", "triton/k/kernel.cubin")


def test_the_second_engine_of_a_kind_compiles_nothing(server: Server, tmp_path: Path) -> None:
    first = Engine(server, tmp_path, "first").starts(*NAMES)
    until(lambda: offered(server) == 1)
    second = Engine(server, tmp_path, "second").starts(*NAMES)
    assert (first.compiles, second.compiles) == (3, 0)
    for name in NAMES:
        part, _, rest = name.partition("/")
        ours, theirs = second.folders[part] / rest, first.folders[part] / rest
        assert ours.read_bytes() == theirs.read_bytes()
        assert ours.stat().st_mtime == pytest.approx(theirs.stat().st_mtime, abs=1e-5)  # ninja goes by it
    first.compiled.close()  # the second one offers them on
    assert problems.find(fetch_status(server.address, keys=KEYS)) == []
    assert Engine(server, tmp_path, "third").starts(*NAMES).compiles == 0
    assert offered(server) == 1
    assert Engine(server, tmp_path, "other", kind="other").starts(*NAMES).compiles == 3  # the control
    assert Engine(server, tmp_path, "off", option="off").starts(*NAMES).compiles == 3


def test_what_an_engine_had_to_add_comes_with_what_it_was_given(server: Server, tmp_path: Path) -> None:
    Engine(server, tmp_path, "first").starts(*NAMES)
    until(lambda: offered(server) == 1)
    assert Engine(server, tmp_path, "second").starts(*NAMES, "triton/more").compiles == 1
    until(lambda: offered(server) == 2)
    assert Engine(server, tmp_path, "third").starts(*NAMES, "triton/more").compiles == 0


def test_a_version_that_could_not_be_written_here_is_not_replaced(server: Server, tmp_path: Path) -> None:
    Engine(server, tmp_path, "first").starts(*NAMES)
    until(lambda: offered(server) == 1)
    full = Engine(server, tmp_path, "full")
    full.folders["triton"].parent.mkdir()
    full.folders["triton"].write_text("a file in a folder's place")
    full.starts("compile/more", "compile/and more")
    until(lambda: all(thread.name != "tensorhub-compiled" for thread in threading.enumerate()))
    assert offered(server) == 1
    assert Engine(server, tmp_path, "third").starts(*NAMES).compiles == 0


def test_what_each_start_writes_is_no_new_version(server: Server, tmp_path: Path) -> None:
    many = [f"compile/{number}" for number in range(20)]
    Engine(server, tmp_path, "first").starts(*many)
    until(lambda: offered(server) == 1)
    Engine(server, tmp_path, "second").starts(*many, "compile/of its own", "compile/also")
    until(lambda: all(thread.name != "tensorhub-compiled" for thread in threading.enumerate()))
    assert offered(server) == 1
    Engine(server, tmp_path, "third").starts(*many, "compile/a", "compile/b", "compile/c")  # the control
    until(lambda: offered(server) == 2)


def test_what_was_there_before_an_engine_is_not_offered_and_not_replaced(server: Server, tmp_path: Path) -> None:
    mine = Engine(server, tmp_path, "mine")
    for text in ("own", "x.lock"):
        path = mine.folders["triton"] / text
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    mine.starts("triton/own", "triton/y.lock", "triton/new")
    until(lambda: offered(server) == 1)
    other = Engine(server, tmp_path, "other")
    other.folders["triton"].mkdir(parents=True)
    (other.folders["triton"] / "new").write_text("its own")
    other.starts()
    assert [path.name for path in other.folders["triton"].iterdir()] == ["new"]
    assert (other.folders["triton"] / "new").read_text() == "its own"


def test_an_owner_may_say_later_where_the_store_is(server: Server, tmp_path: Path) -> None:
    Engine(server, tmp_path, "first").starts(*NAMES, later=True)
    until(lambda: offered(server) == 1)
    assert Engine(server, tmp_path, "second").starts(*NAMES).compiles == 0


def test_without_a_secret_code_goes_nowhere_unless_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TENSORHUB_SECRET", raising=False)
    with start_server() as server:
        Engine(server, tmp_path, "first").starts(*NAMES)
        assert Engine(server, tmp_path, "second").starts(*NAMES).compiles == 3
        assert fetch_status(server.address)["models"] == []  # they have not even joined
        Engine(server, tmp_path, "third", option="on").starts(*NAMES)
        until(lambda: fetch_status(server.address)["models"] and fetch_status(server.address)["models"][0]["versions"])
        assert Engine(server, tmp_path, "fourth", option="on").starts(*NAMES).compiles == 0
        end_all()


@pytest.mark.parametrize(("role", "takes"), [("reader", True), ("observer", False)])
def test_the_holder_of_another_key_gives_no_code(
    role: str, takes: bool, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Engine(server, tmp_path, "first").starts(*NAMES)
    until(lambda: offered(server) == 1)
    monkeypatch.setenv("TENSORHUB_SECRET", Keys.limited(KEYS, role).text())  # type: ignore[arg-type]
    assert compiled.may(Engine(server, tmp_path, "x").joining) == (takes, False)
    assert Engine(server, tmp_path, "second").starts(*NAMES).compiles == (0 if takes else 3)


def test_engines_that_start_at_once_and_leave_are_no_problem(server: Server, tmp_path: Path) -> None:
    engines = [Engine(server, tmp_path, f"e{number}").starts(*NAMES) for number in range(4)]
    until(lambda: offered(server) > 0)
    until(lambda: all(thread.name != "tensorhub-compiled" for thread in threading.enumerate()))
    assert problems.find(fetch_status(server.address, keys=KEYS)) == []
    for engine in engines:
        engine.compiled.close()
    assert problems.find(fetch_status(server.address, keys=KEYS)) == []
    assert Engine(server, tmp_path, "late").starts(*NAMES).compiles == 3  # all who had them are gone


def archive(*members: tuple[str, bytes, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as made:
        for name, kind, content in members:
            member = tarfile.TarInfo(name)
            member.type, member.size, member.linkname = kind, len(content), "../../../etc/passwd"
            made.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


@pytest.mark.parametrize(
    "bad",
    [
        archive(("compile/good", tarfile.REGTYPE, b"x"), ("compile/../../out", tarfile.REGTYPE, b"x")),
        archive(("compile/good", tarfile.REGTYPE, b"x"), ("/etc/out", tarfile.REGTYPE, b"x")),
        archive(("compile/good", tarfile.REGTYPE, b"x"), ("compile//tmp/out", tarfile.REGTYPE, b"x")),
        archive(("compile/good", tarfile.REGTYPE, b"x"), ("elsewhere/out", tarfile.REGTYPE, b"x")),
        archive(("compile/good", tarfile.REGTYPE, b"x"), ("compile/link", tarfile.SYMTYPE, b"")),
        archive(("compile/good", tarfile.REGTYPE, b"x"), ("compile/pipe", tarfile.FIFOTYPE, b"")),
        archive(("compile/good", tarfile.REGTYPE, b"x"), ("compile", tarfile.REGTYPE, b"x")),
        archive(("compile/good", tarfile.REGTYPE, b"x"), ("compile/holes", tarfile.GNUTYPE_SPARSE, b"")),
        b"no archive at all",
        gzip.compress(archive(("compile/good", tarfile.REGTYPE, b"x"))),  # of any size when it is unpacked
        archive(("compile/good", tarfile.REGTYPE, b"x" * 5000))[:1000],
    ],
)
def test_an_archive_that_is_not_ours_writes_nothing(bad: bytes, tmp_path: Path) -> None:
    folders = {"compile": tmp_path / "caches" / "compile"}
    with pytest.raises(VersionRefused):
        compiled.unpack(bad, folders)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    good = archive(("compile/good", tarfile.REGTYPE, b"x"))  # the control
    assert compiled.unpack(good, folders) == ({"compile/good"}, 1)


def test_what_cannot_be_written_keeps_nothing_else_back(tmp_path: Path) -> None:
    folders = {part: tmp_path / "caches" / part for part in ("compile", "flashinfer", "triton")}
    (tmp_path / "caches").mkdir()
    folders["flashinfer"].write_text("a file in a folder's place")
    (tmp_path / "elsewhere").mkdir()
    folders["triton"].symlink_to(tmp_path / "elsewhere")
    (folders["triton"] / "link").symlink_to(tmp_path / "gone")
    names = ("compile/a", "flashinfer/b", "triton/c", "triton/link")
    with pytest.raises(OSError, match="flashinfer"):
        compiled.unpack(archive(*((name, tarfile.REGTYPE, b"x") for name in names)), folders)
    assert (folders["compile"] / "a").exists() and (tmp_path / "elsewhere" / "c").exists()
    assert (folders["triton"] / "link").is_symlink()  # a file that is there, on a disk that is not
    assert not [path for path in tmp_path.rglob(f"{compiled.OURS}*")]


def test_what_a_killed_engine_was_writing_is_removed_and_what_a_live_one_writes_is_not(tmp_path: Path) -> None:
    folders = {"compile": tmp_path / "compile"}
    old, new = (tmp_path / "compile" / f"{compiled.OURS}-{name}" for name in ("old", "new"))
    for path in (old, new):
        path.mkdir(parents=True)
        (path / "x").write_text("half a file")
    (tmp_path / "others").mkdir()
    (tmp_path / "compile" / f"{compiled.OURS}-link").symlink_to(tmp_path / "others")
    for path in (old, tmp_path / "others"):
        os.utime(path, (1.0, 1.0))
    compiled.unpack(archive(("compile/good", tarfile.REGTYPE, b"x")), folders)
    assert (old.exists(), new.exists(), (tmp_path / "others").exists()) == (False, True, True)
    assert compiled.files_in(folders) == {"compile/good"}


@pytest.mark.slow
def test_a_user_without_a_home_has_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("os.getuid", lambda: 987654)  # as in a container with --user
    assert set(compiled.folders()) >= {"compile", "triton"}


def test_a_cache_that_is_too_large_is_not_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(bytes(3000))
    monkeypatch.setattr(compiled, "SIZE_BYTES_MAX", 2000)
    with pytest.raises(UsageError, match="take more than"):
        compiled.pack(["compile/a"], {"compile": tmp_path})
    assert compiled.pack(["compile/gone"], {"compile": tmp_path})


def test_a_hub_that_is_gone_keeps_no_engine_from_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORHUB_SECRET", KEYS.text())
    with start_server(keys=KEYS) as server:
        pass
    engine = Engine(server, tmp_path, "alone")
    engine.joining = WorkerConfig.parse(
        {"hub": server.address, "run": "r", "model": "actor", "replica": "alone", "connect_timeout_s": 0.2}
    )
    assert engine.starts(*NAMES).compiles == 3
    end_all()


def test_an_engine_that_ends_does_not_wait_for_a_hub(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_connecting, may_connect, was_closed = threading.Event(), threading.Event(), threading.Event()
    connect, close = WorkerConfig.connect, Client.close

    def slow(*args: Any, **more: Any) -> Client:
        is_connecting.set()
        assert may_connect.wait(20)
        return connect(*args, **more)

    monkeypatch.setattr(WorkerConfig, "connect", slow)
    monkeypatch.setattr(Client, "close", lambda client: (close(client), was_closed.set()))
    engine = Engine(server, tmp_path, "first").starts(*NAMES, later=True)  # it connects when it has something to offer
    assert is_connecting.wait(20)
    engine.compiled.close()  # hangs here if it waits
    assert not was_closed.is_set()
    may_connect.set()
    assert was_closed.wait(20)
    assert offered(server) == 0


def test_a_start_waits_for_a_hub_by_one_deadline(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Engine(server, tmp_path, "first").starts(*NAMES)
    until(lambda: offered(server) == 1)
    clock, given = iter([1.0, 15.0, 19.0]), list[float]()  # seconds that have passed at each call
    after = SimpleNamespace(after=lambda s: SimpleNamespace(remaining=lambda: s - next(clock)))
    monkeypatch.setattr(compiled, "TIMEOUT_S", 20.0)
    monkeypatch.setattr(compiled, "Deadline", after)

    def told(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, timeout_s: float, **more: Any) -> Any:
            given.append(timeout_s)
            return original(*args, timeout_s=timeout_s, **more)

        return call

    monkeypatch.setattr(Client, "versions", told(Client.versions))
    monkeypatch.setattr(Client, "fetch", told(Client.fetch))
    assert Engine(server, tmp_path, "second").starts(*NAMES).compiles == 0
    assert given == [10.0, 5.0, 1.0]


def test_what_is_too_large_is_refused_before_it_is_read(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def came() -> int:
        return sum(sum(model["read_bytes"].values()) for model in fetch_status(server.address, keys=KEYS)["models"])

    Engine(server, tmp_path, "first").starts(*NAMES)
    until(lambda: offered(server) == 1)
    with monkeypatch.context() as patch:
        patch.setattr(compiled, "SIZE_BYTES_MAX", 1000)
        assert Engine(server, tmp_path, "second").starts().folders["triton"].exists() is False
    assert "at most 0.0 MB" in caplog.text and came() == 0
    Engine(server, tmp_path, "third").starts()  # the control
    until(lambda: came() > 1000)


def test_a_user_of_vllm_who_wants_no_cache_gets_none(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(server, tmp_path, "first")
    assert compiled.may(engine.joining) == (True, True)
    monkeypatch.setenv("VLLM_DISABLE_COMPILE_CACHE", "1")
    assert compiled.may(engine.joining) == (False, False)


def test_what_an_owner_says_is_for_the_engine_that_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compiled.VARIABLE, "of another process")
    with compiled.announced(None):
        assert compiled.VARIABLE not in os.environ
    with pytest.raises(RuntimeError), compiled.announced({"model": "actor"}):
        assert json.loads(os.environ[compiled.VARIABLE]) == {"model": "actor"}
        raise RuntimeError
    assert compiled.VARIABLE not in os.environ


@pytest.mark.slow
def test_an_engine_that_leaves_offers_nothing_on(server: Server, tmp_path: Path) -> None:
    from tensorhub_plugins.vllm.engine.core_follower import _leave

    engine = Engine(server, tmp_path, "first").starts(*NAMES)
    until(lambda: offered(server) == 1)
    core = SimpleNamespace(tensorhub_compiled=engine.compiled, collective_rpc=lambda name: None)
    whole = SimpleNamespace(undo_pause=lambda: None)
    _leave(core, whole, SimpleNamespace(close=lambda: None, ended=None))  # its process may be killed then
    until(lambda: offered(server) == 0)


def test_a_hub_that_was_started_again_in_between_gets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORHUB_SECRET", KEYS.text())
    with start_server(keys=KEYS) as server:
        first = Engine(server, tmp_path, "first").starts("compile/a")
        until(lambda: offered(server) == 1)
        second = Engine(server, tmp_path, "second")
        second.compiled.bring(lambda: second.joining)
    with start_server(server.address, keys=KEYS) as server:
        second.starts("compile/a", "compile/b", again=True)
        until(lambda: offered(server) == 2)
        assert first.compiles == second.compiles == 1
        end_all()


@pytest.mark.slow
def test_engines_have_a_kind_in_common_that_differ_only_in_what_no_compiler_sees(tmp_path: Path) -> None:
    from vllm import EngineArgs
    from vllm_engines import make_model

    model = make_model("qwen3", tmp_path / "model", 1)

    def kind(**given: Any) -> str:
        args = {"model": str(model), "max_model_len": 128, "load_format": "dummy", "skip_tokenizer_init": True, **given}
        return compiled.kind_of(EngineArgs(**args).create_engine_config())

    extra = {"hub": "tcp://127.0.0.1:1", "model": "actor", "replica": "x"}
    same: list[dict[str, Any]] = [{}, {"seed": 7}, {"load_format": "tensorhub", "model_loader_extra_config": extra}]
    assert len({kind(**given) for given in same}) == 1
    other: list[dict[str, Any]] = [{}, {"max_model_len": 64}, {"dtype": "float32"}, {"tensor_parallel_size": 2}]
    other += [{"quantization": "fp8"}, {"enable_lora": True}]
    other += [{"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}]
    assert len({kind(**given) for given in other}) == len(other)


@pytest.mark.heavy
@pytest.mark.timeout(1200)
def test_an_engine_uses_what_another_one_has_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "0")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    from vllm_engines import make_model

    from recipes.bench.vllm_start.compiled import engine, wait_until_offered

    model = make_model("qwen3", tmp_path / "model", 1)

    def libraries(name: str) -> set[str]:
        return {str(path.relative_to(tmp_path / name)) for path in (tmp_path / name).rglob("*.so")}

    with (
        start_server(keys=KEYS) as server,
        engine(model, tmp_path / "first", "first", server.address, KEYS, "auto") as first,
    ):
        wait_until_offered(server.address, KEYS)
        made = libraries("first")
        with engine(model, tmp_path / "second", "second", server.address, KEYS, "auto") as second:
            assert "compiled by others" in second["log"]
            assert made and libraries("second") == made  # by names, which are digests
            assert second["tokens"] == first["tokens"]
        assert problems.find(fetch_status(server.address, keys=KEYS)) == []  # it has left
    print(f"{first['started_s']:.1f} s, and with what it compiled {second['started_s']:.1f} s")
