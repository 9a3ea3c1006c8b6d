"""Images from the domains that an operator allows; the one place where the server opens connections of its own.

What a client names is connected to only if its host is allowed and every address of that host is public. The
connection goes to an address that was looked at, so that a name cannot mean another one a moment later, and a
redirect is followed only to where a client might have sent us itself. One deadline holds for all of it: names are
looked up beside, and each address gets its share of the time that is left.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from urllib.parse import SplitResult, urljoin, urlsplit

from deepinfer.errors import QueueFullError, RequestError, shown
from deepinfer.serve.names import Names, seconds_until

MAX_URLS = 16  # in one request
MAX_SECONDS = 20.0  # for all of them
MAX_REQUESTS = 16  # that download at a time, fewer than the threads that work on bodies
MAX_REDIRECTS = 3
MAX_ADDRESSES = 4  # of a host, tried one after another
PORTS = {"http": 80, "https": 443}
PIECE = 2**16


@dataclass(frozen=True)
class ImageFetcher:
    """Called with (url, name of the image in errors) for each image of a request, gives their bytes.

    domains: hosts as in images.example.org, each itself alone, perhaps with :port. max_bytes: of one image.
    """

    domains: frozenset[str]
    max_bytes: int
    names: Names = field(default_factory=Names)
    turns: threading.BoundedSemaphore = field(default_factory=lambda: threading.BoundedSemaphore(MAX_REQUESTS))

    def __call__(self, images: Sequence[tuple[str, str]]) -> list[bytes]:
        """Raises RequestError for the first one that may not or cannot be had; QueueFullError: too many download."""
        if len(images) > MAX_URLS:
            raise RequestError(f"{len(images)} images are given by URL; at most {MAX_URLS} are downloaded")
        if not self.turns.acquire(blocking=False):
            raise QueueFullError(
                f"{MAX_REQUESTS} requests download images already; try again later or give their bytes"
            )
        try:
            deadline = time.monotonic() + MAX_SECONDS
            return [self._fetch(url, f"{name} at {shown(url)}", deadline) for url, name in images]
        finally:
            self.turns.release()

    def _fetch(self, url: str, name: str, deadline: float) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            place = self._allowed(url, name)
            try:
                addresses = self.names.public_addresses(place.hostname or "", deadline)
                with _response(place, addresses, deadline) as response:
                    if response.status not in (301, 302, 303, 307, 308):
                        return self._body(response, name, deadline)
                    url = urljoin(url, response.headers.get("location", ""))
            except (OSError, http.client.HTTPException, ValueError) as error:
                if isinstance(error, RequestError):
                    raise
                raise RequestError(f"{name} cannot be downloaded ({type(error).__name__}); give its bytes") from None
        raise RequestError(f"{name} is redirected more than {MAX_REDIRECTS} times; give the last URL")

    def _allowed(self, url: str, name: str) -> SplitResult:
        """The parts of a URL that may be connected to."""
        try:
            place = urlsplit(url)
            host, port = (place.hostname or "").lower(), place.port
        except ValueError:
            raise RequestError(f"{name} has no valid URL") from None
        default = PORTS.get(place.scheme)
        authority = host if port in (None, default) else f"{host}:{port}"
        if default is None or "@" in place.netloc or authority not in self.domains:
            raise RequestError(f"{name} is not on a host that this server downloads from; give a data URL")
        return place

    def _body(self, response: http.client.HTTPResponse, name: str, deadline: float) -> bytes:
        if response.status != 200:
            raise RequestError(f"{name} cannot be downloaded (HTTP {response.status})")
        data = bytearray()
        while piece := response.read1(PIECE):
            data += piece
            if len(data) > self.max_bytes:
                raise RequestError(f"{name} has more than {self.max_bytes} bytes (--max-image-bytes)")
        if time.monotonic() >= deadline:  # a connection that was cut looks like the end
            raise TimeoutError
        return bytes(data)


@contextlib.contextmanager
def _response(place: SplitResult, addresses: Sequence[str], deadline: float) -> Iterator[http.client.HTTPResponse]:
    """The answer to a GET; its connection is cut at the deadline, however slowly bytes may come."""
    host, port = place.hostname or "", place.port or PORTS[place.scheme]
    connection = http.client.HTTPConnection(host, port)
    connection.sock = _connected(addresses, port, deadline)
    seconds = seconds_until(deadline)
    spare = connection.sock.dup()  # stays ours, whatever becomes of the other
    cut = threading.Timer(seconds, _cut, (spare,))
    cut.daemon = True
    cut.start()
    try:
        if place.scheme == "https":
            connection.sock = ssl.create_default_context().wrap_socket(connection.sock, server_hostname=host)
        path = (place.path or "/") + (f"?{place.query}" if place.query else "")
        connection.request("GET", path, headers={"accept": "image/*", "accept-encoding": "identity"})
        with connection.getresponse() as response:
            yield response
    finally:
        cut.cancel()
        connection.close()
        spare.close()


def _connected(addresses: Sequence[str], port: int, deadline: float) -> socket.socket:
    """A connection to the first address that takes one. Raises OSError."""
    for place, address in enumerate(addresses[:MAX_ADDRESSES]):
        num_left = min(len(addresses), MAX_ADDRESSES) - place
        try:
            made = socket.create_connection((address, port), timeout=seconds_until(deadline) / num_left)
        except OSError:
            if num_left == 1:
                raise
        else:
            made.settimeout(seconds_until(deadline))
            return made
    raise PermissionError("no address")


def _cut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is closed already
        connection.shutdown(socket.SHUT_RDWR)
