"""Run the RDMA tests (tests/rdma_vm) in virtual machines with soft-RoCE: `python -m recipes.rdma_vm`.

Two guests, joined by a virtual Ethernet: the first runs the cases, the second is the other host of some. Their root is
this machine's, read-only, so this very Python and its packages run in them. They are emulated, at a twentieth of the
speed: nothing here measures time, and time limits are generous.

Exits with 0 when all cases passed; with SKIPPED (77) and the reason when no virtual machine can be made here.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from recipes.rdma_vm.build import CannotBuild, find_or_build, library_path

ROOT = Path(__file__).resolve().parents[2]
SKIPPED = 77  # as automake has it
GUEST_S_MAX = 2400.0  # on an idle machine it takes about a quarter of that
SECOND_GUEST_S_MAX = 30.0  # to end after the first
PR_SET_PDEATHSIG = 1
MTU = 4500  # soft-RoCE then uses its largest packets, 4096 bytes


@dataclass
class Guest:
    """One virtual machine. network: arguments of QEMU; setup: shell lines before the command."""

    name: str
    memory_mib: int
    processors: int
    network: list[str]
    setup: str
    command: list[str]
    out: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="rdma-vm-")))
    process: subprocess.Popen[bytes] | None = None
    shown: int = 0

    def start(self, machine: Path) -> None:
        out = self.out
        (out / "guest.sh").write_text(GUEST.format(setup=self.setup, command=shlex.join(self.command)))
        (out / "log").touch()
        sysroot = machine / "sysroot"
        shares = {"hostroot": "/", "sysroot": sysroot, "modules": machine / "kernel/lib/modules", "out": out}
        command = [f"{sysroot}/usr/bin/qemu-system-x86_64"]
        for folder in ("qemu", "seabios"):
            command += ["-L", f"{sysroot}/usr/share/{folder}"]
        command += ["-M", "q35", "-accel", "tcg,thread=multi", "-cpu", "max", "-nodefaults", "-no-reboot"]
        command += ["-smp", str(self.processors), "-m", str(self.memory_mib), "-display", "none", "-monitor", "none"]
        command += ["-serial", f"file:{out}/serial", "-kernel", f"{machine}/kernel/vmlinux"]
        command += ["-initrd", f"{machine}/initrd.gz", "-device", "virtio-rng-pci"]
        # On a busy machine an emulated timer is late: the check that it works would panic, and the time stamps that are
        # calibrated by it would be far off. Told their frequency, the guest's clock keeps time with ours.
        timer = f"no_timer_check tsc=reliable {_frequency()}"
        command += ["-append", f"console=ttyS0 quiet loglevel=4 panic=-1 mitigations=off {timer}"]
        for index, (tag, folder) in enumerate(shares.items()):
            options = "security_model=none" + ("" if tag == "out" else ",readonly=on")
            more = ",multidevs=remap" if tag == "hostroot" else ""
            command += ["-fsdev", f"local,id=f{index},path={folder},{options}{more}"]
            command += ["-device", f"virtio-9p-pci,fsdev=f{index},mount_tag={tag}"]
        command += self.network
        environment = {**os.environ, "LD_LIBRARY_PATH": library_path(machine)}
        with open(out / "qemu.log", "wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, preexec_fn=_die_with_us)

    def show(self) -> None:
        """Print what the guest has written since the last time, whole lines only."""
        with open(self.out / "log", errors="replace") as log:
            log.seek(self.shown)
            while line := log.readline():
                if not line.endswith("\n"):
                    break
                self.shown = log.tell()
                print(f"{self.name}  {line}", end="", flush=True)

    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.show()

    def exit_code(self) -> int | None:
        """Return the command's exit code; None when the guest did not get that far."""
        try:
            return int((self.out / "exit").read_text())
        except (OSError, ValueError):
            return None

    def explain(self) -> str:
        """Return the end of the machine's own output."""
        texts = [(self.out / name).read_text(errors="replace")[-1500:] for name in ("qemu.log", "serial")]
        return "\n".join(text for text in texts if text.strip())


GUEST = """#!/bin/bash
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TERM=dumb
exec >>/mnt/out/log 2>&1 </dev/null
echo "up after $(cut -d' ' -f1 /proc/uptime) s, Linux $(uname -r)"
ip link set lo up
ulimit -l unlimited
{setup}
rdma link
cd /tmp
{command}
echo $? > /mnt/out/exit.part; mv /mnt/out/exit.part /mnt/out/exit
dmesg > /mnt/out/dmesg; sync
echo o > /proc/sysrq-trigger; sleep 5
"""

# A pair of virtual interfaces stands for a network card of its own.
LOCAL_CARD = f"""
modprobe veth
ip link add v0 type veth peer name v1
ip link set v0 mtu {MTU} up; ip link set v1 mtu {MTU} up
ip addr add 10.77.0.1/24 dev v0
rdma link add rxe0 type rxe netdev v0
"""
CARD = """
modprobe virtio_net
card=$(basename $(dirname $(grep -lix "{mac}" /sys/class/net/*/address)))
ip link set $card mtu {mtu} up; ip addr add {address}/24 dev $card
rdma link add {device} type rxe netdev $card
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", help="names of cases, or `smoke` for a few; default: all")
    parser.add_argument("--json", type=Path, help="write the cases' results here")
    options = parser.parse_args()
    began = time.monotonic()
    try:
        machine = find_or_build()
    except CannotBuild as reason:
        print(f"SKIPPED the RDMA tests: {reason}")
        sys.exit(SKIPPED)
    built = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rdma-vm-") as folder:
        code = run(machine, options.cases, Path(folder), options.json)
    print(f"RDMA tests: {'passed' if not code else 'FAILED'} in {time.monotonic() - built:.0f} s", end="")
    print(f", and {built - began:.0f} s to make the virtual machine" if built - began > 1 else "")
    sys.exit(code)


def run(machine: Path, cases: list[str], folder: Path, results: Path | None) -> int:
    """Run both guests; return the first one's exit code."""
    wire = folder / "wire"

    def command(role: str, *arguments: str) -> list[str]:
        environment = [f"PYTHONPATH={machine}/site:{ROOT}", "OMP_NUM_THREADS=1", "PYTHONDONTWRITEBYTECODE=1"]
        return ["env", *environment, sys.executable, str(ROOT / "tests/rdma_vm/guest.py"), role, *arguments]

    def card(index: int, server: str) -> list[str]:
        netdev = f"stream,id=n0,server={server},addr.type=unix,addr.path={wire}"
        return ["-netdev", netdev, "-device", f"virtio-net-pci,netdev=n0,mac=52:54:00:00:00:0{index},host_mtu={MTU}"]

    def setup(index: int, device: str) -> str:
        return CARD.format(mac=f"52:54:00:00:00:0{index}", address=f"10.79.0.{index}", device=device, mtu=MTU)

    outs = [folder / "one", folder / "two"]
    for out in outs:
        out.mkdir()
    modules = "modprobe rdma_rxe || exit 1"
    two = Guest("2", 2048, 1, card(2, "on"), modules + setup(2, "rxe0"), command("other", *cases), outs[1])
    one = Guest(
        "1", 4096, 2, card(1, "off"), modules + LOCAL_CARD + setup(1, "rxe1"), command("cases", *cases), outs[0]
    )
    deadline = time.monotonic() + GUEST_S_MAX
    try:
        two.start(machine)
        while not wire.exists() and two.running() and time.monotonic() < deadline:
            time.sleep(0.05)
        one.start(machine)
        while one.running() and time.monotonic() < deadline:
            one.show()
            time.sleep(0.2)
        ended = not one.running()
        second = time.monotonic() + SECOND_GUEST_S_MAX
        while ended and two.running() and time.monotonic() < second:
            time.sleep(0.2)
    finally:
        for guest in (one, two):
            guest.stop()
    code = one.exit_code()
    if code is None:
        what = f"did not finish within {GUEST_S_MAX:g} s" if not ended else "ended before its tests did"
        print(f"the first guest {what}:\n{one.explain()}\n{two.explain()}")
        return 1
    if results is not None:
        results.parent.mkdir(parents=True, exist_ok=True)
        results.write_text(json.dumps(json.loads((one.out / "results.json").read_text()), indent=1) + "\n")
    return code


def _frequency() -> str:
    """Return the kernel argument that gives the rate of this processor's time stamp counter."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("cpu MHz"):
            return f"tsc_early_khz={int(float(line.split(':')[1]) * 1000)}"
    return ""


def _die_with_us() -> None:
    """Have the machine killed with its runner, so that none is left behind."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
