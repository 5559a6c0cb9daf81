"""Renders templates to self-contained HTML files, with style and script, that fetch nothing."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import jinja2
from markupsafe import Markup, escape

from posttrain import readable
from posttrain.errors import printable

# Invisible characters: control characters except tab and newline, and those that change the direction of text.
CONTROLS = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\t\n"} | {
    code: f"\u27e8U+{code:04X}\u27e9"
    for code in (*range(0x7F, 0xA0), 0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
}


def render_page(template: str, **content: Any) -> str:
    """Return a page; control characters in it are escaped.

    Args:
        template: File below `templates/`.
        content: Variables of the template; a missing one is an error.
    """
    return printable(_environment().get_template(template).render(**content))


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("posttrain.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": readable.format_number,
        "seconds": readable.format_seconds,
        "size": readable.format_bytes,
        "percent": readable.format_percent,
        "counted": readable.counted,
        "cost": readable.format_cost,
        "code": _with_code,
    }
    return environment


def _with_code(text: str) -> Markup:
    """Return text as HTML; text in backticks becomes `<code>`."""
    return Markup(re.sub("`([^`]+)`", r'<span class="mono">\1</span>', str(escape(text))))


def _visible(value: Any) -> Any:
    return value.translate(CONTROLS) if isinstance(value, str) else value
