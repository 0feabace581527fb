"""Endpoints of the SDKs that are not served, and what to do instead. The SDKs treat the refusal as final."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from echo2.errors import PeerError
from echo2.service.access import Caller
from echo2.service.entrance import Handler

_USAGE = "hours are not kept apart; GET /api/v1/usage tells tokens and dollars by kind of request."
_ARCHIVE = "nothing is written outside of the service; fetch GET .../checkpoints/NAME/archive, a PEFT adapter as tar."
_KEYS = "`echo2 keys DIR` on the service's machine lists, adds and revokes keys."
#: What to do instead, by method and path below /api/v1/.
UNSERVED = {
    ("POST", "auth/token"): "API keys are taken as they are: set TINKER_API_KEY to a tml- key.",
    ("GET", "auth/apikey/me"): _KEYS,
    ("DELETE", "auth/apikey/me"): _KEYS,
    ("GET", "audit"): "no audit log is kept.",
    ("GET", "billing/usage/events"): _USAGE,
    ("GET", "billing/usage/checkpoints/current"): "storage costs nothing; GET /api/v1/checkpoints tells sizes.",
    ("POST", "create_custom_loss"): "custom losses run in the client: call forward_backward_custom.",
    ("POST", "join_sampling_session"): "create a sampling session of the same path instead.",
    ("POST", "retrieve_futures"): "ask for one request at a time, by retrieve_future.",
    ("POST", "save_weights_external"): _ARCHIVE,
    ("GET", "training_runs/{model}/checkpoints/{checkpoint:path}/external_weights_urls"): _ARCHIVE,
    ("POST", "sessions/search"): "GET /api/v1/sessions lists your sessions, newest first.",
    ("PUT", "sessions/{session}/project"): "there are no projects; each tenant has keys of its own.",
    ("GET", "sessions/{session}/trace_export"): "traces are not recorded.",
}


def refusing(words: str) -> Handler:
    """Return a handler that refuses with these words."""

    async def refuse(caller: Caller, request: Request, body: bytes) -> Response:
        raise PeerError("unsupported", f"{request.url.path} is not served here: {words}")

    return refuse
