"""kill -9 of the engine process under load: how soon clients are told, and how soon the service is back.

    python benchmarks/serve/crash.py --kills 5 --clients 32 [options of `deepinfer serve`]

Half of the clients stream, half wait for a whole answer, and all have begun when the engine is killed. Exits 1 if one
of them got anything but an error, or later than after 5 s.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import httpx2 as httpx
from server import Server, running

ASK = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True}
SHORT = {"prompt": "a", "max_tokens": 2}
LIMIT_S = 5.0


def engine_pid(server: Server) -> int:
    """The engine is the web process's only child."""
    (pid,) = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    return int(pid)


def client(url: str, is_stream: bool, ends: list[tuple[float, str]]) -> None:
    """Ask, and note when and how it ended."""
    last: dict[str, object] = {}
    with httpx.Client(base_url=url, timeout=120) as http:
        if is_stream:
            with http.stream("POST", "/v1/completions", json=ASK | {"stream": True}) as response:
                for line in response.iter_lines():
                    last = json.loads(line[6:]) if line.startswith("data: {") else last
        else:
            last = http.post("/v1/completions", json=ASK).json()
    error = last.get("error")
    ends.append((time.monotonic(), str(error["code"]) if isinstance(error, dict) else "no error"))


def kill(server: Server, num_clients: int) -> bool:
    ends: list[tuple[float, str]] = []
    threads = [
        threading.Thread(target=client, args=(server.url, number % 2 == 0, ends)) for number in range(num_clients)
    ]
    for thread in threads:
        thread.start()
    while server.metric("deepinfer:num_requests_running") < num_clients:
        time.sleep(0.05)
    time.sleep(2)  # headers and first tokens are out
    engine, killed = engine_pid(server), time.monotonic()
    os.kill(engine, signal.SIGKILL)
    for thread in threads:
        thread.join()
    told = max(when for when, _ in ends) - killed
    while httpx.post(server.url + "/v1/completions", json=SHORT, timeout=60).status_code != 200:
        time.sleep(0.05)
    back = time.monotonic() - killed
    codes = {code for _, code in ends}
    told_all = f"{', '.join(sorted(codes))} after {told:.2f} s at most"
    print(f"{num_clients} clients: {told_all}; answers again after {back:.2f} s")
    return codes == {"engine_stopped"} and told <= LIMIT_S


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--clients", type=int, default=32)
    args, flags = parser.parse_known_args()
    with running("--max-num-requests", str(args.clients), *flags) as server:
        is_sound = all([kill(server, args.clients) for _ in range(args.kills)])
        restarts = server.metric("deepinfer:engine_restarts")
    print(f"restarts: {restarts:.0f}")
    return 0 if is_sound and restarts == args.kills else 1


if __name__ == "__main__":
    sys.exit(main())
