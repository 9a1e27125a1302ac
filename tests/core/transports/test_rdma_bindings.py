"""The two bindings without a device: the layout of verbs.h, a library and a pyverbs that are made up."""

from __future__ import annotations

import ctypes
import errno
import gc
import importlib.util
import os
import shutil
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tensorhub_plugins.core.errors import UsageError
from tensorhub_plugins.core.transports.rdma import bindings, libibverbs, pyverbs_binding
from tensorhub_plugins.core.transports.rdma.bindings import Read, VerbsError, Way
from tensorhub_plugins.core.transports.rdma.verbs import STATUSES

# --- which one ---


def loads() -> None:
    pass


def does_not(why: str) -> Callable[[], None]:
    def load() -> None:
        raise VerbsError(why)

    return load


def test_ctypes_comes_first_and_pyverbs_where_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(bindings.BINDING_VARIABLE, raising=False)
    monkeypatch.setattr(libibverbs, "load", loads)
    monkeypatch.setattr(pyverbs_binding, "load", loads)
    assert bindings.usable() == [libibverbs, pyverbs_binding]
    monkeypatch.setattr(libibverbs, "load", does_not("no library"))
    assert bindings.usable() == [pyverbs_binding]
    monkeypatch.setattr(pyverbs_binding, "load", does_not("no package"))
    with pytest.raises(VerbsError, match="^no library; no package$"):
        bindings.usable()


def test_the_environment_names_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libibverbs, "load", loads)
    monkeypatch.setattr(pyverbs_binding, "load", does_not("no package"))
    monkeypatch.setenv(bindings.BINDING_VARIABLE, "ctypes")
    assert bindings.usable() == [libibverbs]
    monkeypatch.setenv(bindings.BINDING_VARIABLE, "pyverbs")
    with pytest.raises(VerbsError, match="^no package$"):
        bindings.usable()
    monkeypatch.setenv(bindings.BINDING_VARIABLE, "ucx")
    with pytest.raises(UsageError, match="TENSORHUB_RDMA_BINDING='ucx': one of ctypes, pyverbs"):
        bindings.usable()


# --- verbs.h ---

MEMBERS = {"remote_addr": "wr.rdma.remote_addr", "rkey": "wr.rdma.rkey"}  # of ibv_send_wr: inside its unions
OURS = {  # which the library reads or fills as a whole
    "ibv_device_attr", "ibv_port_attr", "ibv_qp_init_attr", "ibv_qp_attr", "ibv_send_wr", "ibv_sge", "ibv_wc",
}  # fmt: skip


@pytest.fixture(scope="module")
def headers() -> Path:
    """The folder of infiniband/verbs.h: this system's, or that of the virtual machine of recipes.rdma_vm."""
    root = Path(__file__).resolve().parents[3]
    for folder in (Path("/usr/include"), *sorted(root.glob(".envs/rdma-vm-*/sysroot/usr/include"))):
        if (folder / "infiniband" / "verbs.h").exists() and shutil.which("cc"):
            return folder
    pytest.skip("no C compiler, or no infiniband/verbs.h: libibverbs-dev, or `python -m recipes.rdma_vm.build`")


def as_in_c(headers: Path, folder: Path, expressions: list[str]) -> list[int]:
    """What a C compiler makes of these."""
    printed = "".join(f'printf("%zu\\n", (size_t)({expression}));' for expression in expressions)
    source = "#include <stddef.h>\n#include <stdio.h>\n#include <infiniband/verbs.h>\n"
    (folder / "layout.c").write_text(f"{source}int main(void) {{ {printed} return 0; }}")
    subprocess.run(["cc", "-I", str(headers), "-o", "layout", "layout.c"], cwd=folder, check=True)
    return [int(line) for line in subprocess.check_output([folder / "layout"], text=True).split()]


def layout(structs: dict[str, Any]) -> dict[str, int]:
    """C expressions, and what they are here."""
    found = {}
    for name, struct in structs.items():
        if name in OURS:
            found[f"sizeof(struct {name})"] = ctypes.sizeof(struct)
        for field, *_ in struct._fields_:
            if not field.startswith("_"):
                member = MEMBERS.get(field, field) if name == "ibv_send_wr" else field
                found[f"offsetof(struct {name}, {member})"] = getattr(struct, field).offset
                if name != "ibv_context" or field != "ops":
                    found[f"sizeof(((struct {name} *)0)->{member})"] = getattr(struct, field).size
    return found


def test_structs_lie_as_in_verbs_h(headers: Path, tmp_path: Path) -> None:
    here = layout(libibverbs.STRUCTS)
    pointer = ctypes.sizeof(ctypes.c_void_p)
    for name, place in (("poll_cq", "POLL_CQ"), ("req_notify_cq", "REQ_NOTIFY_CQ"), ("post_send", "POST_SEND")):
        here[f"offsetof(struct ibv_context_ops, {name})"] = getattr(libibverbs, place) * pointer
    here["sizeof(struct ibv_context_ops)"] = libibverbs.Context.ops.size
    assert len(here) > 200
    assert dict(zip(here, as_in_c(headers, tmp_path, list(here)), strict=True)) == here


def test_a_struct_that_lies_otherwise_is_found(headers: Path, tmp_path: Path) -> None:
    fields = [("addr", ctypes.c_uint64), ("lkey", ctypes.c_uint32), ("length", ctypes.c_uint32)]
    wrong = layout({"ibv_sge": type("Swapped", (ctypes.Structure,), {"_fields_": fields})})
    assert as_in_c(headers, tmp_path, list(wrong)) != list(wrong.values())


def test_numbers_are_those_of_verbs_h(headers: Path, tmp_path: Path) -> None:
    numbers = {
        "IBV_ACCESS_LOCAL_WRITE": bindings.ACCESS_LOCAL_WRITE,
        "IBV_ACCESS_REMOTE_READ": bindings.ACCESS_REMOTE_READ,
        "IBV_QPT_RC": bindings.RELIABLE_CONNECTION,
        "IBV_QPS_INIT": bindings.STATE_INIT,
        "IBV_QPS_RTR": bindings.STATE_READY_TO_RECEIVE,
        "IBV_QPS_RTS": bindings.STATE_READY_TO_SEND,
        "IBV_QPS_ERR": bindings.STATE_ERROR,
        "IBV_QP_STATE": bindings.QP_STATE,
        "IBV_WR_RDMA_READ": bindings.RDMA_READ,
        "IBV_SEND_SIGNALED": bindings.SEND_SIGNALED,
        "IBV_QP_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX | IBV_QP_PORT": libibverbs.TO_INIT,
        "IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_RQ_PSN | IBV_QP_MIN_RNR_TIMER"
        " | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_DEST_QPN": libibverbs.TO_RECEIVE,
        "IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC"
        " | IBV_QP_SQ_PSN": libibverbs.TO_SEND,
        **{f"IBV_WC_{name}": number for number, name in enumerate(STATUSES)},
    }
    assert dict(zip(numbers, as_in_c(headers, tmp_path, list(numbers)), strict=True)) == numbers


# --- ctypes, over a library that is made up ---


class FakeLibrary:
    """Objects that can be made and destroyed, and a driver that notes what is posted. errors: by function."""

    def __init__(self) -> None:
        self.alive: list[str] = []
        self.destroyed: list[str] = []
        self.modified: list[tuple[int, Any]] = []
        self.posted: list[list[tuple[int, ...]]] = []  # by call
        self.completed: list[tuple[int, int]] = []
        self.errors: dict[str, int] = {}
        self._memory: dict[int, Any] = {}
        self._files = [os.open("/dev/null", os.O_RDONLY) for _ in range(2)]
        operations = (ctypes.c_void_p * 32)()
        self._functions = {
            libibverbs.POST_SEND: libibverbs._post_send(self._post),
            libibverbs.POLL_CQ: libibverbs._poll_cq(self._poll),
            libibverbs.REQ_NOTIFY_CQ: libibverbs._req_notify_cq(lambda queue, solicited: 0),
        }
        for place, function in self._functions.items():
            operations[place] = ctypes.cast(function, ctypes.c_void_p).value
        self.context = libibverbs.Context(1, operations, *self._files, 1)

    def close(self) -> None:
        for fd in self._files:
            os.close(fd)

    def _make(self, kind: str, made: Any) -> int:
        if code := self.errors.get(kind):
            ctypes.set_errno(code)
            return 0
        self.alive.append(kind)
        address = ctypes.addressof(made)
        self._memory[address] = made
        return address

    def _destroy(self, kind: str) -> int:
        self.alive.remove(kind)
        self.destroyed.append(kind)
        return 0

    def ibv_get_device_list(self, count: Any) -> int:
        count._obj.value = 1
        self._devices = (ctypes.c_void_p * 2)(77, None)
        return ctypes.addressof(self._devices)

    def ibv_free_device_list(self, devices: int) -> None:
        assert devices == ctypes.addressof(self._devices)

    def ibv_get_device_name(self, device: int) -> bytes:
        assert device == 77
        return b"mlx5_0"

    def ibv_open_device(self, device: int) -> int:
        assert device == 77
        return self._make("device", self.context)

    def ibv_query_port(self, context: int, number: int, attributes: Any) -> int:
        attributes._obj.lid, attributes._obj.active_mtu, attributes._obj.max_msg_sz = 7, 5, 1 << 31
        return self.errors.get("query", 0)

    def ibv_query_device(self, context: int, attributes: Any) -> int:
        attributes._obj.max_qp_wr, attributes._obj.max_cqe = 100, 200
        attributes._obj.max_qp_init_rd_atom, attributes._obj.max_qp_rd_atom = 16, 17
        return 0

    def ibv_alloc_pd(self, context: int) -> int:
        return self._make("domain", ctypes.c_uint64())

    def ibv_reg_mr(self, domain: int, address: int, size_bytes: int, access: int) -> int:
        return self._make("region", libibverbs.MemoryRegion(lkey=access, rkey=6))

    def ibv_create_comp_channel(self, context: int) -> int:
        return self._make("channel", libibverbs.Channel(context, os.dup(self._files[0])))

    def ibv_create_cq(self, context: int, depth: int, user: None, channel: int, vector: int) -> int:
        return self._make("queue", libibverbs.CompletionQueue(context, channel, None, 0, depth))

    def ibv_get_cq_event(self, channel: int, queue: Any, context: Any) -> int:
        ctypes.set_errno(errno.EAGAIN)
        return -1

    def ibv_create_qp(self, domain: int, wanted: Any) -> int:
        context = libibverbs.CompletionQueue.from_address(wanted._obj.send_cq).context
        self.wanted = wanted._obj
        return self._make("pair", libibverbs.QueuePair(context, qp_num=99))

    def ibv_modify_qp(self, pair: int, attributes: Any, mask: int) -> int:
        self.modified.append((mask, attributes._obj))
        return self.errors.get("modify", 0)

    def ibv_destroy_qp(self, pair: int) -> int:
        return self._destroy("pair")

    def ibv_destroy_cq(self, queue: int) -> int:
        return self._destroy("queue")

    def ibv_destroy_comp_channel(self, channel: int) -> int:
        os.close(self._memory[channel].fd)
        return self._destroy("channel")

    def ibv_dereg_mr(self, region: int) -> int:
        return self._destroy("region")

    def ibv_dealloc_pd(self, domain: int) -> int:
        return self._destroy("domain")

    def ibv_close_device(self, context: int) -> int:
        return self._destroy("device")

    def _post(self, pair: int, first: int, failed: int) -> int:
        if "post" in self.errors:
            return self.errors["post"]
        call: list[tuple[int, ...]] = []
        while first:
            request = libibverbs.Request.from_address(first)
            entry = libibverbs.Entry.from_address(request.sg_list)
            assert (request.num_sge, request.opcode) == (1, bindings.RDMA_READ)
            call.append(
                (request.wr_id, request.send_flags, request.remote_addr, request.rkey)
                + (entry.addr, entry.lkey, entry.length)
            )
            first = request.next
        self.posted.append(call)
        return 0

    def _poll(self, queue: int, limit: int, completions: int) -> int:
        now, self.completed = self.completed[:limit], self.completed[limit:]
        for index, (number, status) in enumerate(now):
            at = completions + index * ctypes.sizeof(libibverbs.Completion)
            found = libibverbs.Completion.from_address(at)
            found.wr_id, found.status = number, status
        return len(now) if "poll" not in self.errors else -self.errors["poll"]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeLibrary]:
    made = FakeLibrary()
    monkeypatch.setattr(libibverbs, "load", lambda: made)
    yield made
    made.close()


def reads(count: int) -> list[Read]:
    return [Read(n, n % 2 == 0, 1000 + n, 10 + n, 2000 + n, 20 + n, 30 + n) for n in range(count)]


def test_a_card_says_its_limits_and_takes_all_with_it(library: FakeLibrary) -> None:
    card = libibverbs.open_card("mlx5_0", 2)
    assert card.limits == (7, 5, 1 << 31, 100, 200, 16, 17)
    region = card.register(4096, 100)
    assert (region.address, region.lkey, region.rkey) == (4096, bindings.ACCESS, 6)
    queue = card.make_queue(8, events=True)
    assert not os.get_blocking(queue.fd)
    pair = card.make_pair(queue, 8)
    assert (pair.number, library.wanted.cap.max_send_wr, library.wanted.qp_type) == (99, 8, 2)
    card.close()
    assert library.destroyed == ["pair", "queue", "channel", "region", "domain", "device"]
    for close in (pair.close, queue.close, region.close, card.close):
        close()
    assert not library.alive and len(library.destroyed) == 6
    for call in (pair.abort, queue.arm, lambda: queue.poll(1), lambda: pair.post(reads(1)), queue.take_event):
        with pytest.raises(OSError, match="is closed"):
            call()


def test_what_nobody_has_any_more_is_destroyed(library: FakeLibrary) -> None:
    """Memory must not stay locked because somebody forgot to say so."""
    card = libibverbs.open_card("mlx5_0", 1)
    region, queue = card.register(4096, 100), card.make_queue(8, events=False)
    pair = card.make_pair(queue, 8)
    del region
    gc.collect()
    assert library.destroyed == ["region"]
    del queue
    gc.collect()
    assert library.destroyed == ["region"], "the pair still reports to it"
    del pair
    gc.collect()
    assert library.destroyed == ["region", "pair", "queue"]
    card.close()


def test_requests_are_chained_and_the_chain_is_used_again(library: FakeLibrary) -> None:
    card = libibverbs.open_card("mlx5_0", 1)
    pair = card.make_pair(card.make_queue(128, events=False), 128)
    for count in (1, 40, 3, 32):
        library.posted.clear()
        pair.post(reads(count))
        flat = [request for call in library.posted for request in call]
        assert flat == [(n, 2 * (n % 2 == 0), 1000 + n, 10 + n, 2000 + n, 20 + n, 30 + n) for n in range(count)]
        assert max(map(len, library.posted)) <= libibverbs.POSTED_AT_ONCE_MAX
    library.errors["post"] = errno.ENOMEM
    with pytest.raises(OSError, match="ibv_post_send: Cannot allocate memory"):
        pair.post(reads(1))
    card.close()


def test_completions_come_as_they_are(library: FakeLibrary) -> None:
    card = libibverbs.open_card("mlx5_0", 1)
    queue = card.make_queue(128, events=True)
    library.completed = [(n, n % 3) for n in range(40)]
    found = queue.poll(32)
    assert found + queue.poll(32) == [(n, n % 3) for n in range(40)] and len(found) == 32
    queue.arm()
    with pytest.raises(BlockingIOError, match="ibv_get_cq_event"):
        queue.take_event()
    library.errors["poll"] = errno.EIO
    with pytest.raises(OSError, match="ibv_poll_cq"):
        queue.poll(1)
    card.close()


def test_a_way_is_three_states(library: FakeLibrary) -> None:
    card = libibverbs.open_card("mlx5_0", 2)
    pair = card.make_pair(card.make_queue(1, events=False), 1)
    pair.connect(Way(5, "::ffff:10.0.0.1", 6, 4, 11, 12, 3, 15, 16))
    (m1, init), (m2, receive), (m3, send) = library.modified
    assert (m1, m2, m3) == (libibverbs.TO_INIT, libibverbs.TO_RECEIVE, libibverbs.TO_SEND)
    assert (init.qp_state, init.port_num, init.qp_access_flags) == (1, 2, bindings.ACCESS_REMOTE_READ)
    assert (receive.qp_state, receive.dest_qp_num, receive.path_mtu, receive.rq_psn) == (2, 5, 4, 11)
    assert bytes(receive.ah_attr.grh.dgid) == bytes(10) + b"\xff\xff\x0a\x00\x00\x01"
    assert (receive.ah_attr.grh.sgid_index, receive.ah_attr.dlid, receive.ah_attr.port_num) == (3, 6, 2)
    assert (receive.max_dest_rd_atomic, send.max_rd_atomic) == (16, 15)
    assert (send.qp_state, send.sq_psn, send.retry_cnt) == (3, 12, bindings.RETRIES)
    library.errors["modify"] = errno.EINVAL
    with pytest.raises(OSError, match="ibv_modify_qp: Invalid argument"):
        pair.abort()
    card.close()


def test_what_the_library_refuses_is_named(library: FakeLibrary) -> None:
    with pytest.raises(VerbsError, match=r"knows \['mlx5_0'\].*ibverbs-providers"):
        libibverbs.open_card("mlx5_7", 1)
    card = libibverbs.open_card("mlx5_0", 1)
    library.errors.update(region=errno.ENOMEM, queue=errno.EMFILE)
    with pytest.raises(OSError, match="ibv_reg_mr: Cannot allocate memory"):
        card.register(0, 1)
    with pytest.raises(OSError, match="ibv_create_cq: Too many open files"):
        card.make_queue(1, events=True)
    assert "channel" not in library.alive
    with pytest.raises(OSError, match="has no ibv_reg_dmabuf_mr"):
        card.register_dma_buf(0, 0, 1, 0)
    card.close()
    library.errors["query"] = -1
    ctypes.set_errno(errno.EIO)
    with pytest.raises(OSError, match="ibv_query_port: Input/output error"):
        libibverbs.open_card("mlx5_0", 1)
    assert not library.alive


def test_a_library_that_is_laid_out_otherwise_is_refused(library: FakeLibrary, tmp_path: Path) -> None:
    right = library.context.cmd_fd
    with open(tmp_path / "file", "w") as file:
        for wrong in (file.fileno(), -1, 1 << 20):
            library.context.cmd_fd = wrong
            with pytest.raises(VerbsError, match="laid out otherwise"):
                libibverbs.open_card("mlx5_0", 1)
    library.context.cmd_fd = right
    library.context.ops[libibverbs.POST_SEND] = None
    with pytest.raises(VerbsError, match="laid out otherwise"):
        libibverbs.open_card("mlx5_0", 1)
    assert not library.alive


@pytest.mark.parametrize(("name", "why"), [("libnowhere.so.9", "cannot be loaded.*libibverbs1"), (None, "ibv_")])
def test_a_library_that_is_missing_or_another(name: str | None, why: str) -> None:
    with pytest.raises(VerbsError, match=why):
        libibverbs.load(name)  # None: this very program


# --- pyverbs ---

MODULES = {
    "device": ("Context",),
    "pd": ("PD",),
    "mr": ("MR", "DmaBufMR"),
    "cq": ("CQ", "CompChannel"),
    "qp": ("QP", "QPCap", "QPInitAttr", "QPAttr"),
    "addr": ("GID", "GlobalRoute", "AHAttr"),
    "wr": ("SGE", "SendWR"),
}


def install(monkeypatch: pytest.MonkeyPatch, without: str = "") -> None:
    """A pyverbs with the names that are used."""

    def module(name: str) -> types.ModuleType:
        made = types.ModuleType(name)
        made.__spec__ = importlib.util.spec_from_loader(name, None)
        monkeypatch.setitem(sys.modules, name, made)
        return made

    module("pyverbs").__path__ = []
    for name, attributes in MODULES.items():
        made = module(f"pyverbs.{name}")
        for attribute in attributes:
            if attribute != without:
                setattr(made, attribute, object())


def test_pyverbs_that_is_missing_there_or_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    load = pyverbs_binding.load.__wrapped__
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(VerbsError, match="python3-pyverbs"):
            load()
    install(monkeypatch)
    assert {name for names in MODULES.values() for name in names} == set(vars(load()))
    install(monkeypatch, without="SendWR")
    with pytest.raises(VerbsError, match="does not fit.*SendWR"):
        load()
