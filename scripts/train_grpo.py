"""`train.py` under its name in version 0.2, which that version's JobSets run when they restart after a failure.

The next version removes this file.
"""

import runpy
from pathlib import Path

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).with_name("train.py")), run_name="__main__")
