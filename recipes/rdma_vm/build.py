"""Make (or find) a small virtual machine with soft-RoCE under .envs/: `python -m recipes.rdma_vm.build` prints where.

Nothing is installed: Debian's packages (kernel, QEMU, rdma-core, pyverbs, and what they need) are downloaded with
apt-get and unpacked. The kernel's own soft-RoCE driver (rdma_rxe) makes a real RDMA device of any network interface, so
that verbs can be tested on a machine without one; a container's kernel rarely has it, a virtual machine's does.

    kernel/      the kernel uncompressed (saves half a minute of emulated decompression) and its modules
    sysroot/     QEMU for the host; rdma-core, kmod and busybox for the guest, laid over the host's root
    initrd.gz    mounts the host's root read-only by 9p, sysroot over it, memory over both, and runs out/guest.sh
    site/        pyverbs alone, for the guest's PYTHONPATH

The folder's name carries a hash of this file; a stamp is written last.
"""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import lzma
import os
import platform
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ENVS = HERE.parents[1] / ".envs"
KERNEL_PACKAGE = "linux-image-amd64"  # the cloud flavour has no soft-RoCE
WITH_DEPENDENCIES = ("qemu-system-x86", "ibverbs-utils", "python3-pyverbs")
ALONE = (
    "kmod",
    "busybox-static",
    "libibverbs1",
    "libibverbs-dev",  # for a test that compares our structs with verbs.h
    "librdmacm1",
    "libnl-3-200",
    "libnl-route-3-200",
    "ibverbs-providers",
    "iproute2",
    "iputils-ping",
    "python3-pyverbs",
)
BOOT_MODULES = ("virtio_pci", "9p", "9pnet_virtio", "overlay")
LIBRARIES = "usr/lib/x86_64-linux-gnu"
XZ_MAGIC = b"\xfd7zXZ\0"

INIT = """#!/bin/busybox sh
B=/bin/busybox
$B mount -t proc proc /proc; $B mount -t sysfs sys /sys; $B mount -t devtmpfs dev /dev
for m in /modules/*.ko; do $B insmod $m || echo "insmod $m failed"; done
O=trans=virtio,version=9p2000.L,msize=512000
$B mount -t 9p -o ro,cache=loose,$O hostroot /host || $B poweroff -f
$B mount -t 9p -o ro,cache=loose,$O sysroot /sysroot || $B poweroff -f
$B mount -t tmpfs -o size=70% tmpfs /memory; $B mkdir /memory/upper /memory/work
L=lowerdir=/sysroot:/host,upperdir=/memory/upper,workdir=/memory/work
$B mount -t overlay -o $L overlay /new || $B poweroff -f
cd /new
for d in proc sys dev; do $B mount --move /$d /new/$d; done
$B mkdir -p dev/pts dev/shm mnt/out lib/modules
$B mount -t devpts devpts dev/pts; $B mount -t tmpfs -o mode=1777 shm dev/shm; $B mount -t tmpfs run run
$B mount -t 9p -o $O,cache=none out /new/mnt/out
$B mount -t 9p -o ro,cache=loose,$O modules /new/lib/modules
exec $B switch_root /new /bin/bash /mnt/out/guest.sh
"""


class CannotBuild(Exception):
    """This machine cannot make the virtual machine; the message is the reason."""


def main() -> None:
    try:
        print(find_or_build())
    except CannotBuild as reason:
        sys.exit(f"no virtual machine: {reason}")


def find_or_build() -> Path:
    """Return the folder of a complete virtual machine. Raise CannotBuild."""
    if platform.machine() != "x86_64" or sys.platform != "linux":
        raise CannotBuild(f"it is made for Linux on x86_64, this is {sys.platform} on {platform.machine()}")
    if sys.version_info[:2] != (3, 11):
        raise CannotBuild(f"Debian 12's pyverbs is for Python 3.11, this is {platform.python_version()}")
    key = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    folder = ENVS / f"rdma-vm-{key}"
    if (folder / ".complete").exists():
        return folder
    missing = [tool for tool in ("apt-get", "apt-cache", "dpkg") if shutil.which(tool) is None]
    if missing:
        raise CannotBuild(f"its packages come from Debian, and there is no {', '.join(missing)} here")
    ENVS.mkdir(exist_ok=True)
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second build waits for the first and finds it done
        if not (folder / ".complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            _build(folder)
    return folder


def _build(folder: Path) -> None:
    began = time.monotonic()
    packages = folder / "packages"
    packages.mkdir(parents=True)
    kernel = _kernel_package()
    _say(f"building {folder.name}: {kernel} and its RDMA tools, from Debian")
    _run(["apt-get", "download", kernel, *_packages()], cwd=packages)
    sysroot, boot = folder / "sysroot", folder / "kernel"
    for package in sorted(packages.glob("*.deb")):
        _run(["dpkg", "-x", str(package), str(boot if package.name.startswith(kernel) else sysroot)])
    # Some packages still ship /lib and /bin: as real folders they would hide the host's links of that name.
    for name in ("bin", "sbin", "lib", "lib64"):
        old = sysroot / name
        if old.is_dir() and not old.is_symlink():
            shutil.copytree(old, sysroot / "usr" / name, symlinks=True, dirs_exist_ok=True)
            shutil.rmtree(old)
    shutil.rmtree(packages)

    release = kernel.removeprefix("linux-image-")
    (folder / "release").write_text(release)
    _run([str(sysroot / "usr/bin/kmod"), "-b", str(boot), release], sysroot, argv0="depmod")
    image = (boot / f"boot/vmlinuz-{release}").read_bytes()
    at = image.find(XZ_MAGIC)
    (boot / "vmlinux").write_bytes(lzma.LZMADecompressor().decompress(image[at:]) if at >= 0 else image)
    (folder / "initrd.gz").write_bytes(gzip.compress(_initrd(sysroot, boot / "lib/modules" / release), 1))
    shutil.copytree(sysroot / "usr/lib/python3/dist-packages/pyverbs", folder / "site/pyverbs")
    (folder / ".complete").write_text(f"{time.monotonic() - began:.0f} s\n")
    _say(f"made in {time.monotonic() - began:.0f} s")


def _kernel_package() -> str:
    """Return the package that linux-image-amd64 stands for today."""
    for attempt in range(2):
        shown = subprocess.run(["apt-cache", "depends", KERNEL_PACKAGE], capture_output=True, text=True).stdout
        for line in shown.splitlines():
            if "Depends: linux-image-" in line:
                return line.split()[-1]
        if not attempt:  # a fresh container has no lists of packages
            update = subprocess.run(["apt-get", "update", "-q"], capture_output=True, text=True)
            if update.returncode:
                raise CannotBuild(f"apt-get update failed: {update.stderr.strip()[-300:]}")
    raise CannotBuild(f"this system's packages have no {KERNEL_PACKAGE}: Debian 12 has")


def _packages() -> list[str]:
    """Return what QEMU and the tools need beyond what is installed, as apt-get plans it, and what the guest needs."""
    planned = subprocess.run(
        ["apt-get", "install", "--simulate", "--no-install-recommends", *WITH_DEPENDENCIES],
        capture_output=True,
        text=True,
    )
    if planned.returncode:
        raise CannotBuild(f"apt-get cannot plan {WITH_DEPENDENCIES}: {planned.stderr.strip()[-300:]}")
    names = {line.split()[1] for line in planned.stdout.splitlines() if line.startswith("Inst ")}
    # Debian's own Python would come along for pyverbs, which here runs in ours.
    needless = {name for name in names if name.startswith(("python3", "libpython3"))}
    return sorted((names - needless) | set(ALONE) | {"qemu-system-x86"})


def _initrd(sysroot: Path, modules: Path) -> bytes:
    """Return a cpio archive: busybox, the modules for the 9p root with what they depend on, in order, and INIT."""
    needs: dict[str, list[str]] = {}
    for line in (modules / "modules.dep").read_text().splitlines():
        name, _, others = line.partition(":")
        needs[name] = others.split()
    ordered: list[str] = []
    for module in BOOT_MODULES:
        path = next(name for name in needs if name.endswith(f"/{module}.ko"))
        ordered += [name for name in (*reversed(needs[path]), path) if name not in ordered]
    entries: list[tuple[str, int, bytes]] = [
        (name, stat.S_IFDIR | 0o755, b"")
        for name in ("bin", "modules", "proc", "sys", "dev", "host", "sysroot", "memory", "new")
    ]
    entries.append(("init", stat.S_IFREG | 0o755, INIT.encode()))
    entries.append(("bin/busybox", stat.S_IFREG | 0o755, (sysroot / "usr/bin/busybox").read_bytes()))
    for index, name in enumerate(ordered):
        content = (modules / name).read_bytes()
        entries.append((f"modules/{index:02d}-{Path(name).name}", stat.S_IFREG | 0o644, content))
    return b"".join(_cpio(index + 1, *entry) for index, entry in enumerate((*entries, ("TRAILER!!!", 0, b""))))


def _cpio(inode: int, name: str, mode: int, content: bytes) -> bytes:
    """Return one member in the "newc" format, which the kernel unpacks."""
    encoded = name.encode() + b"\0"
    fields = (inode, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(encoded), 0)
    head = b"070701" + b"".join(b"%08X" % field for field in fields) + encoded
    return head + b"\0" * (-len(head) % 4) + content + b"\0" * (-len(content) % 4)


def library_path(folder: Path) -> str:
    return str(folder / "sysroot" / LIBRARIES)


def _run(command: list[str], sysroot: Path | None = None, *, cwd: Path | None = None, argv0: str | None = None) -> None:
    environment = dict(os.environ)
    if sysroot is not None:
        environment["LD_LIBRARY_PATH"] = str(sysroot / LIBRARIES)
    done = subprocess.run(
        [argv0 or command[0], *command[1:]],
        executable=command[0] if argv0 else None,
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise CannotBuild(f"{' '.join(command[:4])} ... failed: {(done.stderr or done.stdout).strip()[-500:]}")


def _say(text: str) -> None:
    print(f"rdma-vm: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
