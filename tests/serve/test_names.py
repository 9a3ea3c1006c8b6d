"""Names of hosts: only public addresses, and never more look-ups than hosts."""

import threading
import time

import pytest

from deepinfer.serve import names
from deepinfer.serve.names import Names, is_public
from waiting import PATIENCE, wait_until


@pytest.mark.parametrize("addresses", [["93.184.215.14", "10.0.0.1"], []])
def test_one_private_address_spoils_a_host(monkeypatch, addresses):
    entries = [(2, 1, 6, "", (address, 80)) for address in addresses]
    monkeypatch.setattr(names.socket, "getaddrinfo", lambda *_, **__: entries)
    with pytest.raises(PermissionError):
        Names().public_addresses("mixed.test", time.monotonic() + 60)


def test_a_look_up_that_hangs_is_given_up_and_shared(monkeypatch):
    ends, asked = threading.Event(), []

    def hang(host, *_, **__):
        asked.append(host)
        ends.wait(PATIENCE)
        return []

    monkeypatch.setattr(names.socket, "getaddrinfo", hang)
    one, started = Names(), time.monotonic()
    for host in ("slow.test",) * 20 + ("other.test",) * 20:
        with pytest.raises(TimeoutError):
            one.public_addresses(host, time.monotonic() + 0.01)
    wait_until(lambda: len(asked) == 2)
    assert {*asked} == {"slow.test", "other.test"}, "a thread for each host, not for each request"
    assert time.monotonic() - started < PATIENCE
    ends.set()


def test_a_host_is_looked_up_anew_once_its_answer_is_there(monkeypatch):
    answers = [OSError("gone"), [(2, 1, 6, "", ("93.184.215.14", 0))], UnicodeError("bad"), []]

    def answer(*_, **__):
        value = answers.pop(0)
        if isinstance(value, Exception):
            raise value
        return value

    monkeypatch.setattr(names.socket, "getaddrinfo", answer)
    one, deadline = Names(), time.monotonic() + PATIENCE
    with pytest.raises(OSError, match="gone"):
        one.public_addresses("a.test", deadline)
    assert one.public_addresses("a.test", deadline) == ["93.184.215.14"]
    with pytest.raises(UnicodeError):
        one.public_addresses("a.test", deadline)
    with pytest.raises(PermissionError):
        one.public_addresses("a.test", deadline)


def test_each_address_is_named_once(monkeypatch):
    entries = [(2, 1, 6, "", (address, 80)) for address in ("93.184.215.14", "93.184.215.15", "93.184.215.14")]
    monkeypatch.setattr(names.socket, "getaddrinfo", lambda *_, **__: entries)
    assert Names().public_addresses("two.test", time.monotonic() + 60) == ["93.184.215.14", "93.184.215.15"]


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("93.184.215.14", True), ("2606:2800:21f:cb07:6820:80da:af6b:8b2c", True), ("127.0.0.1", False),
        ("10.1.2.3", False), ("169.254.169.254", False), ("100.64.0.1", False), ("0.0.0.0", False),
        ("224.0.0.1", False), ("::1", False), ("fe80::1%eth0", False), ("fd00::1", False),
        ("::ffff:10.0.0.1", False), ("64:ff9b::a00:1", False), ("2002:0a00:0001::", False),
        ("::10.0.0.1", False), ("::ffff:0:10.0.0.1", False), ("fec0::1", False), ("64:ff9b:1::a00:1", False),
        ("64:ff9b::93.184.215.14", True), ("::ffff:93.184.215.14", True), ("ff0e::1", False),
    ],
)  # fmt: skip
def test_only_addresses_of_the_open_internet_are_public(address, expected):
    assert is_public(address) is expected
