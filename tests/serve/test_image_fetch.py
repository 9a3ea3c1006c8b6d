"""Images by URL: from allowed hosts only, never from addresses that are not public, never more than is allowed."""

import base64
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import deepinfer
from deepinfer.config.serve import ServeOptions
from deepinfer.errors import ConfigError, RequestError
from deepinfer.serve import image_fetch
from deepinfer.serve.body import BIG_BYTES
from deepinfer.serve.image_fetch import MAX_REQUESTS, ImageFetcher
from deepinfer.serve.names import Names
from deepinfer.serve.service import NUM_WORKERS
from serve_client import running
from waiting import PATIENCE, wait_until

EVAL = Path(deepinfer.__file__).parent / "data" / "deepinfer-nano" / "eval" / "eval.jsonl"
RECORD = json.loads(next(line for line in EVAL.read_text().splitlines() if '"image_digit"' in line))
(PART,) = (part for part in RECORD["request"]["messages"][0]["content"] if part["type"] == "image_url")
PICTURE = base64.b64decode(PART["image_url"]["url"].partition(",")[2])


@pytest.fixture(scope="module")
def port():
    """Of a host of pictures, redirects and other answers, one of which does not end while somebody listens."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            name = self.path.partition("?")[0]
            if name in ("/loop", "/away", "/inside"):
                self.send_response(302)
                place = {"/loop": "/loop", "/away": "http://10.0.0.1/", "/inside": "picture.png"}[name]
                self.send_header("location", place)
                self.end_headers()
                return
            self.send_response(200 if name in ("/picture.png", "/slow") else 404)
            self.end_headers()
            try:
                if name != "/slow":
                    self.wfile.write(PICTURE)
                while name == "/slow":
                    self.wfile.write(b"x")
                    time.sleep(0.05)
            except OSError:
                pass

        def log_message(self, *words):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


@pytest.fixture
def host(port, monkeypatch):
    """The same under a name that seems to be public."""
    monkeypatch.setattr(Names, "public_addresses", lambda names, host, deadline: ["127.0.0.2", "127.0.0.1"])
    return f"pictures.test:{port}"


def test_a_picture_of_an_allowed_host_is_answered_like_its_bytes(host):
    with running(allowed_image_domain=(host,)) as server:
        bodies = {
            "/v1/chat/completions": {"type": "image_url", "image_url": {"url": f"http://{host}/inside?a=1"}},
            "/v1/messages": {"type": "image", "source": {"type": "url", "url": f"http://{host}/picture.png"}},
        }
        quiet = {"max_tokens": 4, "temperature": 0, "thinking": {"type": "disabled"}}
        for path, part in bodies.items():
            first, *rest = RECORD["request"]["messages"]
            content = [part if one["type"] == "image_url" else one for one in first["content"]]
            answer = server.post(path, messages=[{**first, "content": content}, *rest], **quiet)
            assert answer.status_code == 200, answer.text
            body = answer.json()
            told = body["choices"][0]["message"] if "choices" in body else body["content"][0]
            assert told.get("content", told.get("text")) == RECORD["answer"]
        part["source"]["url"] = "http://elsewhere.test/picture.png"
        refused = server.post("/v1/messages", messages=[{"role": "user", "content": [part]}], **quiet)
        assert refused.status_code == 400 and "not on a host" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://other.test/picture.png", "not on a host that this server downloads from"),
        ("http://pictures.test/picture.png", "not on a host"),
        ("ftp://{host}/picture.png", "not on a host"),
        ("file:///etc/passwd", "not on a host"),
        ("http://me@{host}/picture.png", "not on a host"),
        ("http://{host}.evil.test/picture.png", "no valid URL"),
        ("http://{host}/away", "not on a host"),
        ("http://{host}/loop", "redirected more than 3 times"),
        ("http://{host}/missing", "cannot be downloaded .HTTP 404."),
        ("http://{host}/a b", "cannot be downloaded .InvalidURL."),
        ("https://{host}/picture.png", "cannot be downloaded .SSLError."),
        ("http://{host}/slow", "cannot be downloaded .*give its bytes"),
    ],
)
def test_what_is_not_a_picture_of_an_allowed_host_is_refused(host, monkeypatch, url, words):
    monkeypatch.setattr(image_fetch, "MAX_SECONDS", 0.5 if url.endswith("/slow") else PATIENCE)
    with pytest.raises(RequestError, match=f"image 1 at .*{words}"):
        ImageFetcher(frozenset([host]), 2**20)([(url.replace("{host}", host), "image 1")])


def test_size_and_number_are_bounded(host):
    fetch = ImageFetcher(frozenset([host]), len(PICTURE) - 1)
    with pytest.raises(RequestError, match=f"more than {len(PICTURE) - 1} bytes"):
        fetch([(f"http://{host}/picture.png", "image 1")])
    with pytest.raises(RequestError, match="17 images are given by URL; at most 16"):
        fetch([(f"http://{host}/picture.png", "image")] * 17)


def test_slow_hosts_leave_threads_for_other_big_bodies(monkeypatch):
    """More requests than there are threads ask for a host that does not answer; a big body comes after them."""
    ends = threading.Event()
    monkeypatch.setattr(Names, "public_addresses", lambda names, host, deadline: [] if ends.wait(PATIENCE) else [])
    part = {"type": "image_url", "image_url": {"url": "http://slow.test/a.png"}}
    statuses = []
    with running({"device": "null"}, allowed_image_domain=("slow.test",)) as server:

        def ask():
            body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 2}
            statuses.append(server.post("/v1/chat/completions", **body).status_code)

        threads = [threading.Thread(target=ask) for _ in range(NUM_WORKERS + 8)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(statuses) == len(threads) - MAX_REQUESTS)
        assert {*statuses} == {429}, "they are told to come back"
        assert server.post("/v1/completions", prompt="a", user="big" * BIG_BYTES, max_tokens=2).status_code == 200
        ends.set()
        for thread in threads:
            thread.join(PATIENCE)
    assert statuses.count(400) == MAX_REQUESTS


def test_an_allowed_host_with_a_private_address_is_not_connected_to(port):
    with pytest.raises(RequestError, match=r"cannot be downloaded .PermissionError."):
        ImageFetcher(frozenset([f"localhost:{port}"]), 2**20)([(f"http://localhost:{port}/picture.png", "image 1")])


def test_no_address_takes_more_than_its_share_of_the_time(monkeypatch):
    seconds = []

    def refuse(place, timeout):
        seconds.append(timeout)
        raise ConnectionRefusedError

    monkeypatch.setattr(image_fetch.socket, "create_connection", refuse)
    found = [f"192.0.2.{n}" for n in range(9)]
    monkeypatch.setattr(Names, "public_addresses", lambda names, host, deadline: found)
    with pytest.raises(RequestError, match="cannot be downloaded .ConnectionRefusedError"):
        ImageFetcher(frozenset(["many.test"]), 2**20)([("http://many.test/a.png", "image 1")])
    assert seconds == pytest.approx([20 / 4, 20 / 3, 20 / 2, 20], rel=0.2)


def test_a_domain_is_a_host_name():
    with pytest.raises(ConfigError, match="allowed_image_domain must be host names"):
        ServeOptions(allowed_image_domain=("https://example.org",))
