"""Pages from templates: one self-contained HTML file, style and script included, nothing fetched."""

from __future__ import annotations

from functools import cache
from typing import Any

import jinja2

from posttrain.errors import printable
from posttrain.observability import report_format


def render_page(template: str, **content: Any) -> str:
    """Return a page; control characters in it are named.

    Args:
        template: File below `templates/`.
        content: Names that the template uses; one that is missing is an error.
    """
    return printable(_environment().get_template(template).render(**content))


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("posttrain.observability", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": report_format.format_number,
        "seconds": report_format.format_seconds,
        "size": report_format.format_bytes,
        "percent": report_format.format_percent,
    }
    return environment
