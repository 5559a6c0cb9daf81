"""What a program should not be able to do: small, harmless probes that print "done" where they succeed.

Each has the prelude's names: FOLDER, a folder of the test's outside of the sandbox, with the files `secret` and
`socket`; PORT, at which the test answers on TCP and UDP; and `bystander()`, another process of the test's.
"""

from __future__ import annotations

PRELUDE = """
import ctypes, os, resource, signal, socket, sys, threading, time
FOLDER, PORT, MARK = {folder!r}, {port}, {mark!r}
libc = ctypes.CDLL(None, use_errno=True)

def bystander():
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = open(f"/proc/{{name}}/cmdline", errors="replace").read().split("\\0")
        except OSError:
            continue
        if words[-2:-1] == [MARK]:
            return int(name)
    raise ProcessLookupError(MARK)

def call(name, *arguments):
    if getattr(libc, name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), name)

def child():
    if pid := os.fork():
        return pid
    time.sleep(60)
    os._exit(0)

def fill(folder, size):
    with open(f"{{folder}}/filled", "wb") as file:
        for _ in range(size >> 20):
            file.write(bytes(1 << 20))
    os.remove(f"{{folder}}/filled")

def found(text):
    assert "a-secret" in text
"""
_PEER = "peer = socket.socket(socket.AF_UNIX)"
_ANSWER = "assert peer.recv(9) == b'hello'"

FILES = {
    "reads a file": "found(open(f'{FOLDER}/secret').read())",
    "writes a file": "open(f'{FOLDER}/written', 'w').close()\nos.remove(f'{FOLDER}/written')",
    "lists a folder": "assert 'secret' in os.listdir(FOLDER)",
    "reads a file through the first process": "found(open(f'/proc/1/root{FOLDER}/secret').read())",
    "reads a file through a link": "os.symlink(f'{FOLDER}/secret', '/tmp/link')\nfound(open('/tmp/link').read())",
    "reads the users": "assert open('/etc/passwd').read()",
    "starts a shell": "assert os.spawnv(os.P_WAIT, '/bin/sh', ['sh', '-c', 'exit 0']) == 0",
    "reads an inherited file": """
for number in range(3, 1024):
    try:
        text = os.pread(number, 100, 0)
    except OSError:
        continue
    if b"a-secret" in text:
        break
else:
    raise FileNotFoundError""",
}
ENVIRONMENT = {
    "reads the environment": "found(os.environ['PROBE_SECRET'])",
    "reads the first process's environment": "found(open('/proc/1/environ').read())",
}
PROCESSES = {
    "finds a process": "bystander()",
    "reads a process's environment": "found(open(f'/proc/{bystander()}/environ').read())",
    "signals a process": "os.kill(bystander(), signal.SIGCONT)",
    "ends all processes": """
pid = bystander()
os.kill(-1, signal.SIGUSR1)
time.sleep(0.3)
assert open(f"/proc/{pid}/stat").read().split()[2] == "Z" """,
    "traces a process": "PTRACE_SEIZE = 0x4206\ncall('ptrace', PTRACE_SEIZE, child(), 0, 0)",
    "reads a process's memory": """
text = ctypes.create_string_buffer(b"text")
class Part(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
part = Part(ctypes.addressof(text), 4)
call("process_vm_readv", child(), ctypes.byref(part), 1, ctypes.byref(part), 1, 0)""",
}
NETWORK = {
    "connects over TCP": f"with socket.create_connection(('127.0.0.1', PORT), 2) as peer:\n    {_ANSWER}",
    "asks over UDP": f"""
peer = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
peer.settimeout(1)
peer.connect(("127.0.0.1", PORT))
peer.send(b"?")
{_ANSWER}""",
    "connects to a socket file": f"{_PEER}\npeer.connect(FOLDER + '/socket')\n{_ANSWER}",
    "connects to a socket without a file": f"{_PEER}\npeer.connect('\\0' + MARK)\n{_ANSWER}",
    "asks the kernel about the network": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW).close()",
}
PRIVILEGES = {
    "becomes root": "os.setuid(0)\nassert os.getuid() == 0",
    "mounts a file system": "call('mount', b'none', b'/tmp', b'tmpfs', 0, None)",
    "mounts again": "MS_BIND, MS_REMOUNT = 4096, 32\ncall('mount', None, b'/tmp', None, MS_BIND | MS_REMOUNT, None)",
    "takes a file system away": "call('umount2', b'/tmp', 2)",
    "changes the root": "os.mkdir('/tmp/root')\nos.chroot('/tmp/root')",
    "makes a user namespace": "call('unshare', 0x10000000)",
    "makes a mount namespace": "call('unshare', 0x00020000)",
    "makes a network namespace": "call('unshare', 0x40000000)",
    "enters a namespace": "call('setns', os.open('/proc/self/ns/uts', os.O_RDONLY), 0)",
    "changes the host's name": "call('sethostname', b'probe', 5)",
    "changes a setting of the kernel": """
path = "/proc/sys/user/max_mnt_namespaces"
value = open(path).read()
open(path, "w").write(value)""",
    "raises its limits": """
for kind in (resource.RLIMIT_CPU, resource.RLIMIT_AS, resource.RLIMIT_FSIZE):
    resource.setrlimit(kind, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))""",
    "locks memory": "text = ctypes.create_string_buffer(1 << 20)\ncall('mlock', text, 1 << 20)",
}
HIDDEN_MEMORY = {
    "keeps memory in a file without a name": "os.close(os.memfd_create('probe'))",
    "keeps memory in a shared segment": "call('shmctl', libc.shmget(0, 4096, 0o1600), 0, None)",
    "keeps memory in a message queue": "call('msgctl', libc.msgget(0, 0o1600), 0, None)",
    "keeps memory in a POSIX queue": """
call("mq_open", b"/probe", os.O_RDWR | os.O_CREAT, 0o600, None)
call("mq_unlink", b"/probe")""",
}
# More than `LIMITS` of the test allow, and little enough for any machine.
LIMITS = {
    # The watcher looks every 20 ms, and later on a busy machine.
    "takes memory": "kept = [b'x' * (1 << 20) for _ in range(200)]\ntime.sleep(1)",
    "takes memory at once": "kept = bytearray(500 << 20)",
    "takes memory in several processes": """
places = [os.pipe() for _ in range(3)]
for _, place in places:
    if not os.fork():
        kept = b"x" * (60 << 20)
        os.write(place, b"x")
        time.sleep(0.5)
        os._exit(0)
assert all(os.read(place, 1) for place, _ in places)
time.sleep(0.3)""",
    "fills /tmp": "fill('/tmp', 60 << 20)",
    "fills /dev/shm": "fill('/dev/shm', 60 << 20)",
    "fills its folder": "fill('.', 60 << 20)",
    "makes many files": "for number in range(400):\n    open(f'/tmp/{number}', 'w').close()\ntime.sleep(0.3)",
    "makes a large file without content": "open('/tmp/large', 'wb').truncate(1 << 30)\nos.remove('/tmp/large')",
    "starts many processes": "pids = [child() for _ in range(12)]\ntime.sleep(0.3)",
    "starts many threads": """
for _ in range(20):
    threading.Thread(target=time.sleep, args=[0.5], daemon=True).start()
time.sleep(0.3)""",
    "opens many files": "kept = [open('/dev/null') for _ in range(300)]",
    "prints much": "print('x' * 100_000)",
    "prints much to the other stream": "print('x' * 100_000, file=sys.stderr, flush=True)\ntime.sleep(0.1)",
    "takes long": "time.sleep(2)",
    "takes long and ignores signals": """
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM):
    signal.signal(number, signal.SIG_IGN)
time.sleep(2)""",
    "takes the processor": "until = time.monotonic() + 2\nwhile time.monotonic() < until:\n    pass",
    "hands its time to a child": """
if not (pid := os.fork()):
    os.setsid()
    time.sleep(2)
    os._exit(0)
os.waitpid(pid, 0)""",
}
# They need seconds each; one that needs as long stays among those for every change.
SLOW = {"takes long and ignores signals", "takes the processor", "hands its time to a child"}
ABUSES = {**FILES, **ENVIRONMENT, **PROCESSES, **NETWORK, **PRIVILEGES, **HIDDEN_MEMORY, **LIMITS}


def program_of(name: str, folder: str, port: int, mark: str) -> str:
    """Return the source of a probe, which prints "done" at its end."""
    return (
        f"{PRELUDE.format(folder=folder, port=port, mark=mark)}\n{ABUSES[name].strip()}\nprint('\\ndone', flush=True)\n"
    )
