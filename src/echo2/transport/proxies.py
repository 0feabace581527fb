"""Which connections go through an HTTP proxy (CONNECT). gRPC would send every address there, also loopback, as soon as
`http_proxy` is set.

A proxy is used only if `grpc_proxy` names it, and never for loopback and private addresses. `http_proxy` and
`https_proxy` are set for browsers and package indexes; such proxies often refuse other ports than 443. `no_proxy`
excepts hosts, as gRPC reads it.
"""

from __future__ import annotations

import os
from urllib.parse import urlsplit

from echo2 import addresses

#: The variable that names the proxy, those that list hosts without it, and others that programs commonly read.
VARIABLE = "grpc_proxy"
EXCEPTIONS = ("no_grpc_proxy", "no_proxy")
OTHERS = ("https_proxy", "http_proxy", "HTTPS_PROXY", "HTTP_PROXY", "all_proxy", "ALL_PROXY")


def proxy_of(host: str) -> str:
    """Return the URL of the proxy for this host; "" to connect directly."""
    return "" if addresses.is_private(host) or _is_excepted(host) else os.environ.get(VARIABLE, "")


def note(host: str) -> str:
    """Return what the variables for proxies mean for a connection to this host, for an error message; "" if none is
    set. Passwords are left out."""
    if url := proxy_of(host):
        return f"It was called through the proxy {_shown(url)}, as {VARIABLE} says: does that allow CONNECT?"
    found = next((name for name in (VARIABLE, *OTHERS) if os.environ.get(name)), "")
    if not found:
        return ""
    told = f"{found} is set, and was not used:"
    if addresses.is_private(host):
        return f"{told} private addresses are called directly."
    if found == VARIABLE:
        return f"{told} no_proxy excepts {host}."
    return f"{told} if only that proxy leads to {host}, set {VARIABLE} to it."


def _is_excepted(host: str) -> bool:
    listed = next((os.environ[name] for name in EXCEPTIONS if os.environ.get(name)), "")
    ends = [entry.strip().removeprefix("*") for entry in listed.split(",")]
    return any(end and host.strip("[]").endswith(end) for end in ends)


def _shown(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}" if parts.netloc else "(no URL)"
