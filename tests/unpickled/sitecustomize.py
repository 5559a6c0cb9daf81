"""Notes, in every Python process of a workflow, who unpickles what: put this folder into PYTHONPATH.

Python tells when an unpickler looks a class or function up, which it must before a pickle can run anything. A line is
`{file that unpickles}:{function} {what was looked up}`, the function being `find_class` where an unpickler has a list
of its own; each process writes each of its lines once.
"""

import os
import sys

LOG = os.environ.get("UNPICKLED_LOG", "")
_seen = set()


def _note(event: str, arguments: tuple) -> None:
    if event != "pickle.find_class":
        return
    frame = sys._getframe(1)
    while frame.f_back and os.path.basename(frame.f_code.co_filename) == "pickle.py":
        frame = frame.f_back
    line = f"{frame.f_code.co_filename}:{frame.f_code.co_name} {arguments[0]}.{arguments[1]}\n"
    if line not in _seen:
        _seen.add(line)
        with open(LOG, "a") as log:
            log.write(line)


if LOG:
    sys.addaudithook(_note)
