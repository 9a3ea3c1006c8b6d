"""Images from the domains that an operator allows; the one place where the server opens connections of its own.

What a client names is connected to only if its host is allowed and every address of that host is public. The
connection goes to an address that was looked at, so that a name cannot mean another one a moment later, and a
redirect is followed only to where a client might have sent us itself. One deadline holds for all of it: names are
looked up beside, and each address gets its share of the time that is left.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from urllib.parse import SplitResult, urljoin, urlsplit

from deepinfer.errors import RequestError, shown

MAX_URLS = 16  # in one request
MAX_SECONDS = 20.0  # for all of them
MAX_REDIRECTS = 3
MAX_ADDRESSES = 4  # of a host, tried one after another
PORTS = {"http": 80, "https": 443}
PIECE = 2**16
GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")  # all that is handed out for the internet of IPv6
NAT64 = ipaddress.ip_network("64:ff9b::/96")  # older addresses, as a translator makes them


@dataclass(frozen=True)
class ImageFetcher:
    """Called with (url, name of the image in errors) for each image of a request, gives their bytes.

    domains: hosts as in images.example.org, each itself alone, perhaps with :port. max_bytes: of one image.
    """

    domains: frozenset[str]
    max_bytes: int

    def __call__(self, images: Sequence[tuple[str, str]]) -> list[bytes]:
        """Raises RequestError for the first one that may not or cannot be had."""
        if len(images) > MAX_URLS:
            raise RequestError(f"{len(images)} images are given by URL; at most {MAX_URLS} are downloaded")
        deadline = time.monotonic() + MAX_SECONDS
        return [self._fetch(url, f"{name} at {shown(url)}", deadline) for url, name in images]

    def _fetch(self, url: str, name: str, deadline: float) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            place = self._allowed(url, name)
            try:
                with _response(place, deadline) as response:
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
def _response(place: SplitResult, deadline: float) -> Iterator[http.client.HTTPResponse]:
    """The answer to a GET; its connection is cut at the deadline, however slowly bytes may come."""
    host, port = place.hostname or "", place.port or PORTS[place.scheme]
    connection = http.client.HTTPConnection(host, port)
    connection.sock = _connected(public_addresses(host, port, deadline), port, deadline)
    seconds = _seconds_until(deadline)
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
            made = socket.create_connection((address, port), timeout=_seconds_until(deadline) / num_left)
        except OSError:
            if num_left == 1:
                raise
        else:
            made.settimeout(_seconds_until(deadline))
            return made
    raise PermissionError("no address")


def public_addresses(host: str, port: int, deadline: float) -> list[str]:
    """The addresses of a host, all of which must be public. Raises OSError, also when the answer takes too long."""
    answer: Future[list[str]] = Future()
    threading.Thread(target=_look_up, args=(host, port, answer), name="deepinfer-names", daemon=True).start()
    found = answer.result(_seconds_until(deadline))
    if not found or not all(map(is_public, found)):
        raise PermissionError("not public")
    return found


def _look_up(host: str, port: int, answer: Future[list[str]]) -> None:
    """Nothing ends a look-up early, so that it has a thread of its own, which nobody waits for after the deadline."""
    try:
        entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        answer.set_exception(error)
    else:
        answer.set_result([*dict.fromkeys(str(entry[4][0]) for entry in entries)])


def _seconds_until(deadline: float) -> float:
    """Raises TimeoutError when it is over."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError
    return seconds


def is_public(address: str) -> bool:
    """Whether an address is one of the open internet, also where it holds an address of the older kind."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip in NAT64:
            return is_public(str(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)))
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo and ip.teredo[1])
        if inner is not None and not is_public(str(inner)):
            return False
        if ip.ipv4_mapped is None and ip not in GLOBAL_UNICAST:
            return False
    return ip.is_global and not ip.is_multicast


def _cut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is closed already
        connection.shutdown(socket.SHUT_RDWR)
