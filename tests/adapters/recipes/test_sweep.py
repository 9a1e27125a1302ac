"""What a run leaves in shared memory is removed after it, and nothing else."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recipes import sweep
from recipes.demo.watch import end_group


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    for name in ("psm_left", "psm_mapped", "psm_old", "sem.mp-left", "vllm_dist_left", "of_a_stranger"):
        (tmp_path / name).write_bytes(bytes(mmap.PAGESIZE))
    os.utime(tmp_path / "psm_old", (1, 1))
    return tmp_path


def test_only_what_is_new_of_its_kind_and_not_in_use_goes(shared: Path) -> None:
    with (shared / "psm_mapped").open("r+b") as file, mmap.mmap(file.fileno(), 0):
        removed = sweep.sweep(str(shared / "run"), time.time() - 60, shared)
    assert {file.name for file in removed} == {"psm_left", "sem.mp-left", "vllm_dist_left"}
    assert {file.name for file in shared.iterdir()} == {"psm_mapped", "psm_old", "of_a_stranger"}


def test_a_semaphore_that_its_maker_alone_has_is_in_use() -> None:
    """As of an engine that is being started while another run on this machine ends."""
    lock = multiprocessing.get_context("spawn").Lock()
    file = sweep.SHARED / f"sem.{lock._semlock.name[1:]}"  # type: ignore[attr-defined]
    assert file.exists() and str(file) not in sweep.read(Path("/proc/self/maps"))  # which is why the inode is compared
    assert sweep._remove([file]) == [] and file.exists()
    copy = file.with_name(f"{file.name}-copy")  # the control
    copy.write_bytes(file.read_bytes())
    assert sweep._remove([copy]) == [copy] and not copy.exists()


def test_what_is_open_and_not_mapped_yet_or_mapped_where_it_is_not_seen_is_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of an engine that starts just now, or of another container that shares the memory of this one."""
    monkeypatch.setattr(sweep, "CLOSE_S", 0.0)
    left, mapped = (sweep.SHARED / f"psm_{what}_{os.getpid()}" for what in ("left", "mapped"))  # with leases
    for file in (left, mapped):
        file.write_bytes(bytes(mmap.PAGESIZE))
    with left.open("rb"):
        assert sweep._remove([left]) == []
    with mapped.open("r+b") as opened:
        memory = mmap.mmap(opened.fileno(), 0)
    monkeypatch.setattr(sweep, "processes", lambda: iter(()))
    assert sweep._remove([mapped]) == []
    memory.close()
    assert sweep._remove([left, mapped]) == [left, mapped] and not left.exists() and not mapped.exists()  # the control


def test_what_is_no_file_of_ours_stays(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Everybody may put links and folders there."""
    own = tmp_path_factory.mktemp("own") / "notes"
    own.write_bytes(b"")
    (shared / "psm_link").symlink_to(own)
    (shared / "psm_nowhere").symlink_to("nowhere")
    (shared / "psm_folder").mkdir()
    removed = sweep.sweep(str(shared / "run"), time.time() - 60, shared)
    assert {file.name for file in removed} == {"psm_left", "psm_mapped", "sem.mp-left", "vllm_dist_left"}
    assert {file.name for file in shared.glob("psm_*")} == {"psm_link", "psm_nowhere", "psm_folder", "psm_old"}


def test_a_run_of_any_name_is_found() -> None:
    run = os.fsdecode(b"/tmp/l\xe4uft\n")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(["cat"], bufsize=0, env={**os.environ, "RUN": run}, **pipes) as process:  # type: ignore[call-overload]
        process.stdin.write(b"!")
        assert process.stdout.read(1) == b"!", "before, the kernel may show no environment yet"
        assert sweep._is_of(Path(f"/proc/{process.pid}"), run)
        assert not sweep._is_of(Path(f"/proc/{process.pid}"), f"{run}2")  # the control


def test_who_is_killed_leaves_nothing_of_its_own(tmp_path: Path) -> None:
    for name in ("psm_mine", "psm_both", "psm_other"):
        (tmp_path / name).write_bytes(bytes(mmap.PAGESIZE))
    hold = (
        "import mmap, sys\n"
        "files = [open(name, 'r+b') for name in sys.argv[1:]]\n"
        "kept = [mmap.mmap(file.fileno(), 0) for file in files]\n"
        "print(flush=True); input()"
    )

    def start(*names: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", hold, *(str(tmp_path / name) for name in names)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        process = subprocess.Popen(command, text=True, process_group=0, **pipes)  # type: ignore[call-overload]
        assert process.stdout is not None
        process.stdout.readline()
        return process  # type: ignore[no-any-return]

    victim, other = start("psm_mine", "psm_both"), start("psm_both", "psm_other")
    try:
        assert [file.name for file in sweep.kill_group(victim.pid, tmp_path)] == ["psm_mine"]
        assert victim.wait(10) == -signal.SIGKILL and other.poll() is None
        assert {file.name for file in tmp_path.iterdir()} == {"psm_both", "psm_other"}
    finally:
        for process in (victim, other):
            process.kill()
            process.communicate()


@pytest.mark.parametrize("is_told", [True, False])
def test_a_demo_that_is_ended_ends_its_run(is_told: bool) -> None:
    """False: the control."""
    script = (
        "import subprocess, sys, time\n"
        "from recipes.demo.watch import end_cleanly_when_told, end_group\n"
        f"{is_told} and end_cleanly_when_told()\n"
        "run = subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
        "try:\n"
        "    print(run.pid, flush=True); time.sleep(1000)\n"
        "finally:\n"
        "    end_group(run)\n"
    )
    root = Path(sweep.__file__).parents[1]
    demo = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=root)
    assert demo.stdout is not None
    run = int(demo.stdout.readline())
    demo.terminate()
    demo.wait(30)
    demo.stdout.close()
    # Not its command line: that is empty for a moment after Popen has returned, until the new program has its stack.
    goes_on = Path(f"/proc/{run}").exists()
    if goes_on:
        os.kill(run, signal.SIGKILL)
    assert goes_on != is_told


def test_who_of_a_run_does_not_hear_is_ended_with_it() -> None:
    """The run itself ends when it is told; a node of its cluster does not."""
    deaf = "echo $$; while sleep 1; do :; done"
    command = ["bash", "-c", f"trap '' TERM; bash -c '{deaf}' & trap 'exit 0' TERM; echo heard; wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as run:
        assert run.stdout is not None
        said = {run.stdout.readline().strip() for _ in range(2)}
        (node,) = said - {"heard"}
        assert "sleep" in sweep.read(Path(f"/proc/{node}/cmdline"))
        end_group(run)
    assert run.returncode == 0 and not sweep.read(Path(f"/proc/{node}/cmdline"))


def test_a_cluster_that_is_told_twice_ends_its_nodes_all_the_same() -> None:
    script = (
        "import signal, time\n"
        "from recipes import cluster\n"
        "signal.signal(signal.SIGTERM, cluster._end)\n"
        "try:\n"
        "    print('up', flush=True); time.sleep(1000)\n"
        "finally:\n"
        "    print('ends', flush=True); input(); print('ended', flush=True)\n"
    )
    root = Path(sweep.__file__).parents[1]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    told = subprocess.Popen([sys.executable, "-c", script], text=True, cwd=root, **pipes)  # type: ignore[call-overload]
    assert told.stdout.readline() == "up\n"
    told.terminate()
    assert told.stdout.readline() == "ends\n"
    told.terminate()
    assert told.communicate("\n", timeout=30)[0] == "ended\n"  # which closes both pipes


def test_it_waits_for_the_processes_of_the_run(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = str(shared / "run")
    command = [sys.executable, "-c", "print(flush=True); input()"]
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "RUN": run}
    )
    assert child.stdin is not None and child.stdout is not None
    child.stdout.readline()
    waits = []

    def end(seconds: float) -> None:
        waits.append(seconds)
        child.communicate("\n")

    monkeypatch.setattr(sweep.time, "sleep", end)
    sweep.sweep(run, time.time() - 60, shared)
    assert len(waits) == 1 and child.returncode == 0


def test_what_does_not_end_by_itself_is_ended(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine: the processes of the run still hold what they have mapped when the time is up."""
    monkeypatch.setattr(sweep, "WAIT_S", 0.0)
    run, hold = str(shared / "run"), "import mmap, sys; f = open(sys.argv[1], 'r+b'); m = mmap.mmap(f.fileno(), 0)"
    script = f"{hold}; print(flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    processes = [
        subprocess.Popen([sys.executable, "-c", script, str(shared / name)], env={**os.environ, **more}, **pipes)
        for name, more in (("psm_left", {"RUN": run}), ("psm_mapped", {"RUN": "another"}), ("psm_old", {"RUN": run}))
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        assert "psm_left" in {file.name for file in sweep.sweep(run, time.time() - 60, shared)}
        assert processes[0].wait(10) == -signal.SIGKILL
        assert processes[1].poll() is None  # another run's
        assert processes[2].poll() is None  # it holds nothing of this run
        assert (shared / "psm_mapped").exists()
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_it_does_not_wait_for_the_script_that_runs_it(tmp_path: Path) -> None:
    subprocess.run(
        ["bash", "-c", f'"{sys.executable}" -m recipes.sweep "$RUN" inf; exit'],
        env={**os.environ, "RUN": str(tmp_path)},
        cwd=Path(sweep.__file__).parents[1],
        timeout=sweep.WAIT_S / 2,
        check=True,
    )
