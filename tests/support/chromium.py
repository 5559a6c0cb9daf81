"""Pages in a real browser: Debian's Chromium, headless, without a network; a script of ours measures what it draws."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.requirements import require

CHROMIUM = shutil.which("chromium")
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--allow-file-access-from-files", "--dump-dom"),
)
# `blink::mojom::PreferredColorScheme`.
SCHEMES = {"dark": 0, "light": 1}
MEASURE = Path(__file__).with_name("measure_page.js")


def measure_pages(
    pages: Mapping[str, Path], widths: Sequence[int], scheme: str
) -> dict[tuple[str, int], dict[str, Any]]:
    """Return what `measure_page.js` finds of each page at each width.

    Args:
        pages: Name -> file.
        widths: Of the window, in px.
        scheme: A key of `SCHEMES`.
    """
    require("chromium", "" if CHROMIUM else "Chromium is not installed (make env-chromium)")
    frames = [(name, width) for name in pages for width in widths]
    tags = "".join(
        f'<iframe src="{name}.html" style="width:{width}px;height:900px"></iframe>' for name, width in frames
    )
    with tempfile.TemporaryDirectory() as folder:
        for name, page in pages.items():
            shutil.copy(page, Path(folder, f"{name}.html"))
        harness = Path(folder, "all pages.html")
        harness.write_text(f"<!doctype html>{tags}<pre></pre><script>{MEASURE.read_text()}</script>")
        own = (f"--user-data-dir={folder}/profile", f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}")
        command = [str(CHROMIUM), *OPTIONS, *own, harness.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    (found,) = re.findall(r"<pre>(.*)</pre>", done.stdout, re.DOTALL)
    measured = json.loads(html.unescape(found))
    return dict(zip(frames, measured, strict=True))
