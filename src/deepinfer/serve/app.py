"""The ASGI application: which path is answered by which function."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from deepinfer.serve import chat, completions, info, messages, openapi, page, responses, tokens
from deepinfer.serve.errors import ApiError
from deepinfer.serve.gate import Gate
from deepinfer.serve.service import Service

ROUTES = (
    ("POST", "/v1/chat/completions", chat.create),
    ("POST", "/v1/completions", completions.create),
    ("POST", "/v1/messages", messages.create),
    ("POST", "/v1/messages/count_tokens", messages.count_tokens),
    ("POST", "/v1/responses", responses.create),
    ("GET", "/v1/responses/{response_id}", responses.retrieve),
    ("POST", "/v1/responses/{response_id}/cancel", responses.cancel),
    ("DELETE", "/v1/responses/{response_id}", responses.delete),
    ("GET", "/v1/models", info.models),
    ("GET", "/v1/models/{name:path}", info.model),
    ("POST", "/tokenize", tokens.tokenize),
    ("POST", "/detokenize", tokens.detokenize),
    ("POST", "/generate", tokens.generate),
    ("POST", "/abort", tokens.abort),
    ("GET", "/", page.index),
    ("GET", "/page/{name}", page.part),
    ("GET", "/openapi.json", openapi.document),
    ("GET", "/health", info.health),
    ("GET", "/ready", info.ready),
    ("GET", "/version", info.version),
    ("GET", "/metrics", info.metrics),
)


def build_app(service: Service, keys: tuple[str, ...]) -> Starlette:
    """The application around a service. keys: of clients; none = everybody may ask."""
    middleware = [Middleware(Gate, keys=keys, metrics=service.metrics, traces=service.traces)]
    if service.options.allowed_origin:
        allowed = [*service.options.allowed_origin]
        methods = sorted({method for method, _, _ in ROUTES})
        cors = Middleware(CORSMiddleware, allow_origins=allowed, allow_methods=methods, allow_headers=["*"])
        middleware.insert(0, cors)
    app = Starlette(
        routes=[Route(path, endpoint, methods=[method]) for method, path, endpoint in ROUTES],
        middleware=middleware,
        exception_handlers={HTTPException: _raise_as_ours},
    )
    app.state.service = service
    return app


async def _raise_as_ours(request: Request, error: Exception) -> Response:
    """Starlette's own refusals (unknown path, wrong method) in the shape of the others."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:256]}: {error.detail}"
    if error.status_code != 405:
        raise ApiError(error.status_code, message, code="not_found")
    path = getattr(request.scope.get("route"), "path", "")
    allowed = ", ".join(sorted({method for method, one, _ in ROUTES if one == path}))
    raise ApiError(405, message, code="method_not_allowed", headers={"allow": allowed})
