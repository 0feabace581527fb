"""The files that a page is made of, and the headers of every answer to a browser. The run's dashboard and the service's
pages are made of the same parts.
"""

from __future__ import annotations

from importlib.resources import files
from importlib.resources.abc import Traversable

from starlette.responses import Response

#: Browsers load resources from this server only and run no inline code: the text of a rollout is not trusted.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
#: Parts of any page; they say nothing of a run.
PARTS = ("parts.js", "charts.js", "page.css", "icon.svg", "uPlot.iife.min.js", "uPlot.min.css")
PAGE = files("echo2") / "views" / "page"


def asset(name: str, folder: Traversable = PAGE) -> Response:
    """Return a file of a folder."""
    return Response((folder / name).read_bytes(), media_type=TYPES[name.rpartition(".")[2]])
