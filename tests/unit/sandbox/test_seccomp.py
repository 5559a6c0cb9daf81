"""The system call filter, asked from inside a sandbox and by an interpreter of its instructions."""

from __future__ import annotations

import errno
import platform
import struct

import pytest

from posttrain.sandbox.program import Limits, Program
from posttrain.sandbox.run import run_sync
from posttrain.sandbox.seccomp import seccomp_filter

ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x50000 | errno.EPERM
ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# name -> numbers from the kernel's tables (arch/x86/entry/syscalls/syscall_64.tbl, include/uapi/asm-generic/unistd.h)
REFUSED = {"memfd_create": (319, 279), "ptrace": (101, 117), "shmget": (29, 194), "bpf": (321, 280), "mount": (165, 40)}
ALLOWED = {"read": (0, 63), "execve": (59, 221), "mmap": (9, 222), "openat": (257, 56), "exit_group": (231, 94)}
SOCKET, CLONE3, PRLIMIT64 = (41, 198), 435, (302, 261)


def verdict(machine: str, number: int, argument: int = 0, arch: int = 0) -> int:
    """Interpret the filter as the kernel does."""
    program = list(struct.iter_unpack("<HBBI", seccomp_filter(machine)))
    data = struct.pack("<IIQQ", number, arch or ARCHES[machine], 0, argument)
    loaded = place = 0
    while True:
        code, if_true, if_false, value = program[place]
        place += 1
        if code == 0x06:
            return value
        if code == 0x20:
            (loaded,) = struct.unpack_from("<I", data, value)
        else:
            assert code in (0x15, 0x35)
            place += if_true if (loaded == value if code == 0x15 else loaded >= value) else if_false


@pytest.mark.parametrize("machine", ARCHES)
def test_calls_are_refused_by_their_numbers(machine: str) -> None:
    column = [*ARCHES].index(machine)
    assert {name: verdict(machine, numbers[column]) for name, numbers in REFUSED.items()} == dict.fromkeys(
        REFUSED, REFUSE
    )
    assert {verdict(machine, numbers[column]) for numbers in ALLOWED.values()} == {ALLOW}
    families = {family: verdict(machine, SOCKET[column], family) for family in (1, 2, 10, 16, 17, 38, 40)}
    assert [family for family, found in families.items() if found == ALLOW] == [1, 2, 10]
    assert verdict(machine, CLONE3) == 0x50000 | errno.ENOSYS
    limits = PRLIMIT64[column]
    assert [verdict(machine, limits, pid) for pid in (0, 1, 2, 0xFFFFFFFF)] == [ALLOW, REFUSE, REFUSE, REFUSE]


@pytest.mark.parametrize("machine", ARCHES)
def test_calls_of_another_machine_end_the_program(machine: str) -> None:
    assert verdict(machine, 0, arch=0x40000003) == KILL
    assert verdict(machine, 0x40000000) == KILL


def test_a_machine_without_a_table_has_no_filter() -> None:
    assert seccomp_filter("riscv64") == b""


PROBE = """
import ctypes, resource, socket
libc = ctypes.CDLL(None, use_errno=True)
print(libc.memfd_create(b"x", 0), ctypes.get_errno())
print(libc.shmget(0, 4096, 0o1600), ctypes.get_errno())
for family in (socket.AF_UNIX, socket.AF_INET, socket.AF_VSOCK, socket.AF_NETLINK):
    try:
        socket.socket(family, socket.SOCK_STREAM if family != socket.AF_NETLINK else socket.SOCK_RAW).close()
        print("made")
    except OSError as error:
        print(error.errno)
resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))
try:
    resource.prlimit(1, resource.RLIMIT_CPU, (1, 1))
except PermissionError as error:
    print(error.errno)
"""


@pytest.mark.skipif(platform.machine() not in ARCHES, reason="no table of this machine's system calls")
def test_the_kernel_reads_it_alike() -> None:
    words = run_sync(Program(PROBE), Limits()).stdout.decode().split()
    no_family = str(errno.EAFNOSUPPORT)
    assert words == [
        "-1",
        str(errno.EPERM),
        "-1",
        str(errno.EPERM),
        "made",
        "made",
        no_family,
        no_family,
        str(errno.EPERM),
    ]
