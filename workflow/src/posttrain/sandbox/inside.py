"""The first process in a sandbox: waits for the caller, starts the program within its limits, and reaps orphans.

`run` passes this file's text to Python with `-c`, since the sandbox does not see the library. It uses the standard
library alone. Arguments: the file descriptor of the caller, limits as NAME=NUMBER separated by commas, rules of
Landlock (see `posttrain.sandbox.landlock`) or nothing, and the command, or the path of the source.
"""

import _signal  # `signal` imports `enum`, which takes milliseconds
import _sitebuiltins
import builtins
import os
import resource
import sys


def _restrict(rules: str) -> None:
    """Apply rules of Landlock to this process and those that it starts.

    Raises:
        OSError: The kernel refuses.
    """
    import _ctypes  # `ctypes` would take milliseconds

    syscall = _ctypes.dlsym(_ctypes.dlopen(None, os.RTLD_NOW), "syscall")  # type: ignore[arg-type]  # None: this process
    create_ruleset, add_rule, restrict_self, path_beneath = 444, 445, 446, 1

    def call(*arguments: object) -> int:
        answer: int = _ctypes.call_function(syscall, arguments)
        if answer < 0:
            raise OSError(f"Landlock: call {arguments[0]} failed")
        return answer

    first, *others = rules.split("\n")
    attributes = b"".join(int(word).to_bytes(8, sys.byteorder) for word in first.split())
    ruleset = call(create_ruleset, attributes, len(attributes), 0)
    for line in others:
        rights, _, path = line.partition(" ")
        number = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = int(rights).to_bytes(8, sys.byteorder) + number.to_bytes(4, sys.byteorder)
        call(add_rule, ruleset, path_beneath, rule, 0)
        os.close(number)
    call(restrict_self, ruleset, 0)
    os.close(ruleset)


def _wait(number: int) -> None:
    """Tell the caller that the sandbox stands, and end unless the caller is there to say go on."""
    os.write(number, b"r")
    if os.read(number, 1) != b"g":
        os._exit(1)


def _reap_until(child: int, caller: int) -> None:
    """End with the exit code of a child, and with it all processes of the namespace.

    It reports to the caller before it exits; no report means that it was killed from outside.
    """
    # The kernel keeps signals from its namespace off the first process, unless it handles them.
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    for number in range(3):
        os.close(number)
    ended = 0
    while ended != child:
        ended, status = os.wait()
    os.write(caller, b"e")
    os._exit(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))


def _limit(words: str) -> None:
    for word in words.split(","):
        name, value = word.split("=")
        kind = getattr(resource, f"RLIMIT_{name}")
        _, most = resource.getrlimit(kind)
        # Beyond the CPU's soft limit the program gets SIGXCPU, and SIGKILL a second later.
        hard = int(value) + (name == "CPU")
        hard = hard if most == resource.RLIM_INFINITY else min(hard, most)
        resource.setrlimit(kind, (min(int(value), hard), hard))


def _run_source(path: str) -> None:
    """Run a file as `__main__`, as `python FILE` does."""
    for name in ("exit", "quit"):  # the module `site`, which costs milliseconds, defines them elsewhere
        setattr(builtins, name, _sitebuiltins.Quitter(name, "Ctrl-D (i.e. EOF)"))
    sys.argv = [path]
    sys.path.insert(0, os.path.dirname(path))
    with open(path, "rb") as file:
        text = file.read()
    code, fresh = compile(text, path, "exec"), {"__name__": "__main__", "__file__": path, "__builtins__": builtins}
    namespace = sys.modules["__main__"].__dict__
    namespace.clear()  # the names of this file, which the code here can no longer use
    namespace.update(fresh)
    exec(code, namespace)


def _start(caller: str, limits: str, rules: str, *command: str) -> None:
    if rules:
        _restrict(rules)
    _wait(int(caller))
    if child := os.fork():
        _reap_until(child, int(caller))
    os.close(int(caller))
    _limit(limits)
    if len(command) == 1:
        _run_source(command[0])
    else:
        os.execv(command[1], command[1:])


if __name__ == "__main__":
    _start(*sys.argv[1:])
