"""Hooks of `make docs`: pages of the whole repository under their own paths, and the rules as Snakemake draws them."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.superfences import fence_code_format
from rejections import render_page

ROOT = Path(__file__).parent.parent
PAGES = ("*.md", "docs/*.md", "docs/*.svg", "docs/decisions/*.md", "*/README.md")
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!\w+://|#|mailto:)([^()\s#]+)[^()\s]*\)")
RULES = """# The rules of a run

The rules of the demo and what each waits for, as `snakemake --rulegraph` writes them for mermaid, which a browser loads
from the network. [What they do](README.md#what-runs).

```mermaid
{graph}
```
"""


def on_config(config: Any) -> Any:
    """Draw fences of mermaid."""
    mermaid = {"name": "mermaid", "class": "mermaid", "format": fence_code_format}
    config.mdx_configs["pymdownx.superfences"] = {"custom_fences": [mermaid]}
    return config


def on_files(files: Files, config: Any) -> Files:
    """Take pages from the whole repository, and keep what the theme brings."""
    paths = sorted({str(path.relative_to(ROOT)) for pattern in PAGES for path in ROOT.glob(pattern)})
    found = [File(path, str(ROOT), config.site_dir, config.use_directory_urls) for path in paths]
    theme = [file for file in files if file.src_dir != config.docs_dir]
    made = {"rules.md": RULES.format(graph=rule_graph()), "rejections.md": render_page(ROOT)}
    generated = [File.generated(config, name, content=content) for name, content in made.items()]
    return Files([*found, *generated, *theme])


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Make plain text of links to files that are no pages: the site has no source code."""
    folder = os.path.dirname(page.file.src_uri)

    def shown(match: re.Match[str]) -> str:
        target = os.path.normpath(os.path.join(folder, match[2]))
        return match[0] if files.get_file_from_path(target) or not (ROOT / target).exists() else match[1]

    return LINK.sub(shown, markdown)


def rule_graph() -> str:
    """Return the graph of the demo's rules for mermaid, without Snakemake's colours."""
    command = ["snakemake", "--dry-run", "--forceall", "--rulegraph", "mermaid-js"]
    drawn = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    lines = drawn[drawn.index("flowchart") :].splitlines()
    return "\n".join(line for line in lines if not line.strip().startswith("style "))
