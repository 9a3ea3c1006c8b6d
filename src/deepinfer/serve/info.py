"""What the server says of itself: models, health, version, metrics."""

from __future__ import annotations

from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from deepinfer.__about__ import __version__
from deepinfer.serve.errors import ApiError
from deepinfer.serve.metrics import CONTENT_TYPE
from deepinfer.serve.service import Service


async def models(request: Request) -> Response:
    """The names of the model."""
    service: Service = request.app.state.service
    ends = {"first_id": service.names[0], "last_id": service.names[-1], "has_more": False}
    return JSONResponse({"object": "list", "data": [_model(service, name) for name in service.names], **ends})


async def model(request: Request) -> Response:
    """One of them."""
    service: Service = request.app.state.service
    name = request.path_params["name"]
    if name not in service.names:
        raise ApiError(404, f"model {name!r:.80} is not here; this server has {', '.join(service.names)}", "model",
                       "model_not_found")  # fmt: skip
    return JSONResponse(_model(service, name))


def _model(service: Service, name: str) -> dict[str, object]:
    """In the words of OpenAI, of vLLM and (the last three) of Anthropic."""
    limits = service.link.limits
    return {
        "id": name, "object": "model", "created": service.started, "owned_by": "deepinfer",
        "root": service.names[0], "max_model_len": None if limits is None else limits.max_model_len,
        "type": "model", "display_name": name, "created_at": datetime.fromtimestamp(service.started, UTC).isoformat(),
    }  # fmt: skip


async def health(request: Request) -> Response:
    """Whether the engine runs, not only the web process: 200 or 503."""
    service: Service = request.app.state.service
    is_up = service.link.is_up
    body = {
        "status": "ok" if is_up else "engine is down",
        "engine": "up" if is_up else "starting",
        "engine_restarts": service.supervisor.num_restarts,
        "requests": service.link.num_requests,
    }
    return JSONResponse(body, 200 if is_up else 503)


async def ready(request: Request) -> Response:
    """Whether new requests are taken: the engine runs and the server is not being stopped."""
    service: Service = request.app.state.service
    is_ready = service.link.is_up and not service.is_draining
    return JSONResponse({"ready": is_ready}, 200 if is_ready else 503)


async def version(request: Request) -> Response:
    return JSONResponse({"version": __version__})


async def metrics(request: Request) -> Response:
    """For Prometheus."""
    service: Service = request.app.state.service
    page = service.metrics.page(service.link.stats, service.supervisor.num_restarts)
    return Response(page, headers={"content-type": CONTENT_TYPE})
