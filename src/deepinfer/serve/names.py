"""Names of hosts to their addresses, all of which must be on the open internet."""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from concurrent.futures import Future

GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")  # all that is handed out for the internet of IPv6
NAT64 = ipaddress.ip_network("64:ff9b::/96")  # older addresses, as a translator makes them


class Names:
    """Looks hosts up. Nothing ends a look-up early, so each has a thread of its own, which nobody waits for after
    the deadline; who asks for a host that is being looked up waits with the others. So a resolver that hangs holds
    one thread for each host at most. Used from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[str, Future[list[str]]] = {}  # guarded by the lock

    def public_addresses(self, host: str, deadline: float) -> list[str]:
        """The addresses of a host, all of which must be public. deadline: on time.monotonic().

        Raises OSError, also when the answer takes too long.
        """
        with self._lock:
            answer = self._running.get(host)
            if answer is None:
                answer = Future()
                arguments = (host, answer)
                threading.Thread(target=self._look_up, args=arguments, name="deepinfer-names", daemon=True).start()
                self._running[host] = answer  # the thread forgets it behind this lock
        found = answer.result(seconds_until(deadline))
        if not found or not all(map(is_public, found)):
            raise PermissionError("not public")
        return found

    def _look_up(self, host: str, answer: Future[list[str]]) -> None:
        try:
            entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            found = [*dict.fromkeys(str(entry[4][0]) for entry in entries)]
        except (OSError, UnicodeError) as error:
            self._forget(host)
            answer.set_exception(error)
        else:
            self._forget(host)
            answer.set_result(found)

    def _forget(self, host: str) -> None:
        """The next one asks anew."""
        with self._lock:
            del self._running[host]


def seconds_until(deadline: float) -> float:
    """How long it is until a deadline. Raises TimeoutError when it is over."""
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
