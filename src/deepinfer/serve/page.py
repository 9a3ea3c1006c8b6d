"""The page at `/`: plain files, sent as they lie in the package."""

from __future__ import annotations

from functools import cache
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response

from deepinfer.serve.errors import ApiError

SCRIPT = "text/javascript"
FILES = {"index.html": "text/html", "page.css": "text/css"}
FILES |= dict.fromkeys(("client.js", "chat.js", "images.js", "live.js"), SCRIPT)
HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


async def index(request: Request) -> Response:
    """The page itself."""
    return _file("index.html")


async def part(request: Request) -> Response:
    """A file that the page asks for."""
    name = request.path_params["name"]
    if name not in FILES:
        raise ApiError(404, f"/page/{name:.80} is no file of the page", code="not_found")
    return _file(name)


def _file(name: str) -> Response:
    return Response(_read(name), headers={**HEADERS, "content-type": f"{FILES[name]}; charset=utf-8"})


@cache
def _read(name: str) -> bytes:
    return (resources.files("deepinfer.serve") / "page" / name).read_bytes()
