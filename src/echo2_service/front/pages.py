"""The pages of the service: a tenant's, and the owner's. Each is a file that says nothing of anybody; the data come
from the endpoints that programs use, too.

A browser sends the key once, in the body of a form, and then as two halves, which only what changes nothing accepts: a
cookie that scripts cannot read, and a header from what the page's own origin keeps. Programs on other ports of the same
host share the cookie, and neither learn the key from it nor can they set another. No address ever has a key in it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from html import escape
from importlib.resources import files
from urllib.parse import parse_qs

from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from echo2.core.errors import PeerError
from echo2.views.assets import HEADERS, PARTS, asset
from echo2_service import limits
from echo2_service.front.database import UNREACHED
from echo2_service.front.request_guard import (
    NO_KEY,
    Body,
    RequestGuard,
    cookie_of,
    for_browsers,
    read_body,
    refused,
    split,
)

FOLDER = files("echo2_service") / "pages"
#: Files that these pages load, beside the parts of all pages.
SCRIPTS = ("service.js", "tenant.js", "owner.js")
#: As of the dashboard, but its own forms may be sent, and name this server as their origin.
POLICY = HEADERS["Content-Security-Policy"].replace("form-action 'none'", "form-action 'self'")
REFERRER = "same-origin"
ELSEWHERE = "The form was sent by a page of another site; sign in on this one."
WHY = "{why}"
ASKING = "Type or paste an API key of yours."


class Pages:
    """Routes of pages behind the keys of `guard`, of their scripts, and of signing in and out."""

    def __init__(self, guard: RequestGuard) -> None:
        self._guard = guard

    def routes(self) -> list[Route]:
        """Return the routes; none of them is below those of the SDKs."""
        made = [Route("/", _page("tenant.html")), Route("/owner", _page("owner.html"))]
        made += [Route(f"/{name}", _asset) for name in (*PARTS, *SCRIPTS)]
        made.append(Route("/sign-in", _asking, methods=["GET"]))
        made.append(Route("/sign-in", self._sign_in, methods=["POST"]))
        made.append(Route("/sign-out", self._sign_out, methods=["POST"]))
        return made

    async def _sign_in(self, request: Request) -> Response:
        """Give the halves of a key that is valid to the browser: to its cookie, and to the page, behind the "#" of an
        address, which no browser sends."""
        if _is_from_elsewhere(request):
            return _sign_in_page(PeerError("scope", ELSEWHERE))
        body = Body()
        try:
            passage = self._guard.traffic.begin("")  # the caller is not known yet
        except PeerError as error:
            return refused(error)
        try:
            await read_body(request, passage, body, limits.SIGN_IN_BYTES_MAX)
            key = parse_qs(body.content.decode("latin-1")).get("key", [""])[0].strip()
            caller = self._guard.api_keys.admit(key)
        except PeerError as error:
            return _sign_in_page(error)
        except UNREACHED:
            return _sign_in_page(PeerError("rate", "The service cannot reach its database at the moment; try again."))
        except ClientDisconnect:
            return Response(status_code=400)
        finally:
            passage.end()
        cookie, half = split(key)
        page = f"/{'owner' if 'owner' in caller.scopes else ''}#page={half}"
        response = RedirectResponse(page, status_code=303, headers=HEADERS)
        is_encrypted = request.url.scheme == "https"
        response.set_cookie(cookie_of(request), cookie, httponly=True, samesite="strict", secure=is_encrypted)
        return response

    async def _sign_out(self, request: Request) -> Response:
        if _is_from_elsewhere(request):
            return _sign_in_page(PeerError("scope", ELSEWHERE))
        response = RedirectResponse("/", status_code=303, headers=HEADERS)
        response.delete_cookie(cookie_of(request), httponly=True, samesite="strict")
        return response


def _is_from_elsewhere(request: Request) -> bool:
    """Whether a browser sends a form of another site, which would sign it in with another person's key, or out."""
    headers = request.headers
    if site := headers.get("sec-fetch-site"):  # of browsers, over encrypted lines and on this machine
        return site not in ("same-origin", "none")
    origin = headers.get("origin")
    return origin is not None and origin.partition("://")[2] != headers.get("host")


def _page(name: str) -> Callable[[Request], Awaitable[Response]]:
    """Return a page for who has signed in. Its data are for who has the key."""

    async def page(request: Request) -> Response:
        return _framed(asset(name, FOLDER)) if request.cookies.get(cookie_of(request)) else await _asking(request)

    return page


async def _asking(_: Request) -> Response:
    return _sign_in_page(PeerError("unauthenticated", NO_KEY))


async def _asset(request: Request) -> Response:
    name = request.url.path.removeprefix("/")
    return for_browsers(asset(name, FOLDER) if name in SCRIPTS else asset(name))


def _sign_in_page(error: PeerError) -> Response:
    """Return the page that asks for a key, and says why the one that was sent is refused."""
    why = ASKING if error.detail == NO_KEY else error.detail
    page = (FOLDER / "sign_in.html").read_text().replace(WHY, escape(why))
    return _framed(HTMLResponse(page, refused(error).status_code))


def _framed(response: Response) -> Response:
    response.headers["Content-Security-Policy"] = POLICY
    response.headers["Referrer-Policy"] = REFERRER
    return for_browsers(response)
