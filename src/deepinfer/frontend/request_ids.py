"""Names of requests: given by the caller or made up, unique among those that are alive."""

from __future__ import annotations

import itertools

from deepinfer.errors import RequestError, shown

MAX_ID_CHARACTERS = 256


class RequestIds:
    """Hands out request ids; safe to use from several threads.

    It takes no lock, so that it may also be used where the garbage collector ends a stream: every
    change is one operation of a dict, which no other thread can split.
    """

    def __init__(self) -> None:
        self._owners: dict[str, object] = {}  # alive id -> a mark of whoever took it
        self._more: dict[str, list[str]] = {}  # id -> ids of the further answers to its prompt
        self._numbers = itertools.count()

    def take(self, request_id: str | None = None) -> str:
        """Reserve the id, or a new one, until it is released.

        Raises RequestError for an id that is not a text of 1 to 256 characters or still in use.
        """
        if request_id is None:
            return next(name for n in self._numbers if self._is_taken_now(name := f"request-{n}"))
        _check(request_id)
        if not self._is_taken_now(request_id):
            raise RequestError(
                f"request_id {request_id!r:.80} belongs to a request that is still running; "
                "choose another or leave it out"
            )
        return request_id

    def take_more(self, request_id: str, count: int) -> list[str]:
        """New ids for further answers to the prompt of a request whose id is taken; each is to be released."""
        if count:
            self._more[request_id] = [self.take() for _ in range(count)]
        return self._more.get(request_id, [])

    def answers_to(self, request_id: str) -> list[str]:
        """The id and those that `take_more` gave for it."""
        return [request_id, *self._more.get(request_id, ())]

    def release(self, request_id: str) -> None:
        """The request is over; its id may be used again. Unknown ids are ignored."""
        self._more.pop(request_id, None)
        self._owners.pop(request_id, None)

    def _is_taken_now(self, request_id: str) -> bool:
        """Take the id if nobody has it."""
        mark = object()
        return self._owners.setdefault(request_id, mark) is mark


def _check(request_id: object) -> None:
    if not isinstance(request_id, str) or not 0 < len(request_id) <= MAX_ID_CHARACTERS:
        raise RequestError(
            f"request_id is {shown(request_id)}; it must be a text of 1 to {MAX_ID_CHARACTERS} characters"
        )
