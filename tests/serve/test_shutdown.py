"""`deepinfer serve` as a process: flags, config file, signals."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx2 as httpx
import pytest

import deepinfer
import goldens
from deepinfer.cli.main import main
from deepinfer.cli.serve import read_config, resolve_aliases
from deepinfer.errors import ConfigError
from waiting import PATIENCE, is_running, wait_until

SOURCE = Path(deepinfer.__file__).parents[1]


class Process:
    """`deepinfer serve` with its log."""

    def __init__(self, *flags):
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "deepinfer", "serve", "--port", "0", "--device", "null", *flags],
            stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(SOURCE)},
        )  # fmt: skip
        self.lines = []
        for line in self.popen.stderr:
            self.lines.append(line)
            if found := re.search(r"listening on (http://[\w.:]+)", line):
                self.url = found[1]
                return
        raise AssertionError("".join(self.lines))

    def is_closed(self):
        """Whether it takes no more connections."""
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=PATIENCE).close()
        except ConnectionError:
            return True
        return False

    def end(self):
        self.popen.kill()
        self.popen.wait(PATIENCE)
        self.popen.stderr.close()


@pytest.fixture
def start():
    processes = []

    def make(*flags):
        processes.append(Process(*flags))
        return processes[-1]

    yield make
    for process in processes:
        process.end()


def test_a_first_sigterm_drains(start):
    process = start("--max-num-seqs", "4", "--log-json")
    assert any("--max-num-seqs is --max-num-requests here" in line for line in process.lines)
    assert json.loads(process.lines[-1])["level"] == "info"
    body = {"prompt": [5], "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", process.url + "/v1/completions", json=body, timeout=PATIENCE) as response:
        lines = response.iter_lines()
        next(lines)
        process.popen.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]" and '"finish_reason": "length"' in rest[-2]
    assert process.popen.wait(PATIENCE) == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(process.url + "/health")


def test_a_second_sigterm_is_final(start):
    process = start("--model", str(goldens.CHECKPOINT))
    body = {"prompt": [5], "max_tokens": 32_000, "n": 20, "temperature": 1, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", process.url + "/v1/completions", json=body, timeout=PATIENCE) as response:
        lines = response.iter_lines()
        next(lines)
        process.popen.send_signal(signal.SIGTERM)
        wait_until(process.is_closed)
        assert process.popen.poll() is None
        process.popen.send_signal(signal.SIGTERM)
        assert process.popen.wait(PATIENCE) == 128 + signal.SIGTERM


def test_a_killed_server_takes_its_engine_with_it(start):
    process = start()
    pid = next(int(found[1]) for line in process.lines if (found := re.search(r"ready \(process (\d+)\)", line)))
    process.popen.kill()
    wait_until(lambda: not is_running(pid))


def test_a_config_file_holds_options_by_any_of_their_names(tmp_path, capsys):
    file = tmp_path / "serve.yaml"
    file.write_text("port: 9000\nmax_num_seqs: 3\napi-key: [a, b]\nstrict-fields: true\n")
    assert read_config(str(file)) == {"port": 9000, "max_num_requests": 3, "api_key": ("a", "b"), "strict_fields": True}
    assert "--max-num-seqs is --max-num-requests here" in capsys.readouterr().err
    for text in ("- a", "a: [", "3"):
        file.write_text(text)
        with pytest.raises(ConfigError):
            read_config(str(file))


def test_other_engines_flags_are_known_to_serve_alone(capsys):
    assert resolve_aliases(["serve", "--context-length=9"]) == ["serve", "--max-model-len=9"]
    assert resolve_aliases(["chat", "--context-length=9"]) == ["chat", "--context-length=9"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--port", "99999"], "port is 99999"),
        (["--max-model-len", "10000000"], "max_model_len is 10000000"),
        (["--api-key-file", "/nowhere"], "api_key_file '/nowhere' cannot be read"),
        (["--host", "192.0.2.1"], "cannot listen on 192.0.2.1"),
        (["--model", "/nowhere"], "there is no such folder"),
        (["--api-key", "a b"], "api_key must be texts"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(capsys, flags, words):
    assert main(["serve", "--device", "null", "--port", "0", "--log-level", "error", *flags]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
