"""The name of `train.py` in version 0.2: a JobSet of that version starts it again after a failure.

The next version drops this file.
"""

import runpy
from pathlib import Path

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).with_name("train.py")), run_name="__main__")
