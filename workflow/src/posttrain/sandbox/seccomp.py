"""A seccomp filter that removes system calls which a program does not need and namespaces do not contain.

Memory of `memfd_create`, System V shared memory and message queues belongs to no process, so a watcher of processes
would not see it. Sockets of families other than Unix and IP (vsock, kernel crypto) reach beyond a network namespace.
Everything else in the list is kernel interface that only debuggers, tracers and container managers use.
"""

from __future__ import annotations

import errno
import platform
import socket
import struct

# Machine -> (AUDIT_ARCH, number of `socket`, number of `clone3`, numbers of the refused calls).
_NEWER = {
    *(425, 426, 427),  # io_uring
    *(428, 429, 430, 431, 432, 433, 442),  # mounts by file descriptors
    *(438, 447),  # pidfd_getfd, memfd_secret
}
_X86_64 = {
    *(319, 29, 68, 64, 240),  # memfd_create, shmget, msgget, semget, mq_open
    *(248, 249, 250, 321, 298, 323),  # add_key, request_key, keyctl, bpf, perf_event_open, userfaultfd
    *(101, 310, 311),  # ptrace, process_vm_readv, process_vm_writev
    *(165, 166, 155, 161, 272, 308),  # mount, umount2, pivot_root, chroot, unshare, setns
    *(303, 304, 300, 103),  # name_to_handle_at, open_by_handle_at, fanotify_init, syslog
    *(175, 313, 246, 320, 169),  # init_module, finit_module, kexec_load, kexec_file_load, reboot
}
_AARCH64 = {
    *(279, 194, 186, 190, 180),
    *(217, 218, 219, 280, 241, 282),
    *(117, 270, 271),
    *(40, 39, 41, 51, 97, 268),
    *(264, 265, 262, 116),
    *(105, 273, 104, 294, 142),
}
_MACHINES = {
    "x86_64": (0xC000003E, 41, 435, 302, _X86_64 | _NEWER),
    "aarch64": (0xC00000B7, 198, 435, 261, _AARCH64 | _NEWER),
}
_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)
# Numbers from here on are the x32 calls of x86_64.
_X32 = 0x40000000
# Instructions and return values of classic BPF (linux/filter.h, linux/seccomp.h).
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
# Offsets in `struct seccomp_data`; arguments are little-endian.
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16


def seccomp_filter(machine: str = "") -> bytes:
    """Return the filter for bubblewrap's `--seccomp`; empty for a machine whose call numbers are not listed here.

    Args:
        machine: As `platform.machine()` spells it; empty: this machine.
    """
    known = _MACHINES.get(machine or platform.machine())
    if known is None:
        return b""
    arch, socket_number, clone3, prlimit64, refused = known
    refuse = _instruction(_RETURN, _ERRNO | errno.EPERM)
    program = [
        _instruction(_LOAD, _ARCH),
        _instruction(_EQUAL, arch, 1, 0),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD, _NUMBER),
        _instruction(_AT_LEAST, _X32, 0, 1),
        _instruction(_RETURN, _KILL),
    ]
    for number in sorted(refused):
        program += [_instruction(_EQUAL, number, 0, 1), refuse]
    # A process sets its own limits (pid 0), and those of no other: the sandbox's first one has to outlive them all.
    program += [
        _instruction(_EQUAL, prlimit64, 0, 4),
        _instruction(_LOAD, _FIRST_ARGUMENT),
        _instruction(_EQUAL, 0, 0, 1),
        _instruction(_RETURN, _ALLOW),
        refuse,
    ]
    # The flags of clone3 lie in memory, where a filter cannot read them; glibc falls back to clone.
    program += [_instruction(_EQUAL, clone3, 0, 1), _instruction(_RETURN, _ERRNO | errno.ENOSYS)]
    program += [_instruction(_EQUAL, socket_number, 1, 0), _instruction(_RETURN, _ALLOW)]
    program += [_instruction(_LOAD, _FIRST_ARGUMENT)]
    for family in _FAMILIES:
        program += [_instruction(_EQUAL, family, 0, 1), _instruction(_RETURN, _ALLOW)]
    return b"".join([*program, _instruction(_RETURN, _ERRNO | errno.EAFNOSUPPORT)])


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)
