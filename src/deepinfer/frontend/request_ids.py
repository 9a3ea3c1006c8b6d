"""Names of requests: given by the caller or made up, unique among those that are alive."""

from __future__ import annotations

import itertools
import threading

from deepinfer.errors import RequestError

MAX_ID_CHARACTERS = 256


class RequestIds:
    """Hands out request ids; safe to use from several threads."""

    def __init__(self) -> None:
        self._alive: set[str] = set()
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def take(self, request_id: str | None = None) -> str:
        """Reserve the id, or a new one, until it is released.

        Raises RequestError for an id that is not a text of 1 to 256 characters or still in use.
        """
        if request_id is not None:
            _check(request_id)
        with self._lock:
            if request_id is None:
                request_id = next(name for n in self._numbers if (name := f"request-{n}") not in self._alive)
            elif request_id in self._alive:
                raise RequestError(
                    f"request_id {request_id!r:.80} belongs to a request that is still running; "
                    "choose another or leave it out"
                )
            self._alive.add(request_id)
        return request_id

    def release(self, request_id: str) -> None:
        """The request is over; its id may be used again. Unknown ids are ignored."""
        with self._lock:
            self._alive.discard(request_id)


def _check(request_id: object) -> None:
    if not isinstance(request_id, str) or not 0 < len(request_id) <= MAX_ID_CHARACTERS:
        raise RequestError(
            f"request_id is {request_id!r:.80}; it must be a text of 1 to {MAX_ID_CHARACTERS} characters"
        )
