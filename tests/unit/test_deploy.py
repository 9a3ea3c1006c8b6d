"""The image and the systemd unit name only what is there: files, flags, paths and limits."""

from __future__ import annotations

import ast
import configparser
import importlib
import json
import re
import shlex
import tomllib
from pathlib import Path
from unittest.mock import patch

import pytest

from deepinfer.cli.main import build_parser, main
from deepinfer.config.serve import ServeOptions
from deepinfer.serve.app import ROUTES

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
UNIT = (ROOT / "deploy" / "deepinfer.service").read_text()
IGNORE = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]


def instructions(name):
    """What follows this word, for each instruction of the Dockerfile that begins with it."""
    kept = "".join(line for line in DOCKERFILE.splitlines(keepends=True) if not line.lstrip().startswith("#"))
    lines = kept.replace("\\\n", " ").splitlines()
    return [line.partition(" ")[2].strip() for line in lines if line.partition(" ")[0] == name]


def comments(text):
    return " ".join(line.strip("# \\") for line in text.splitlines() if line.startswith("#"))


def parsed(words):
    """The arguments of a command line as the program takes them; a flag that it does not know is an error."""
    assert Path(words[0]).name == "deepinfer"
    return build_parser().parse_args(words[1:])


def unit(section):
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str
    parser.read_string(UNIT)
    return parser[section]


def test_the_image_starts_a_server_that_others_reach():
    (entrypoint,) = map(json.loads, instructions("ENTRYPOINT"))
    args = parsed(entrypoint)
    assert args.run.__module__ == "deepinfer.cli.serve" and args.host == "0.0.0.0"
    example = re.search(r"docker run .* deepinfer( --model \S+)", comments(DOCKERFILE))
    assert parsed([*entrypoint, *example[1].split()]).model == "/models/my-checkpoint"


def test_the_health_check_asks_a_path_that_the_server_has():
    (check,) = instructions("HEALTHCHECK")
    command, flag, code = json.loads(check.partition("CMD")[2])
    assert (command, flag) == ("python", "-c")
    with patch("urllib.request.urlopen") as asked:
        exec(code, {})
    port = ServeOptions().port
    assert instructions("EXPOSE") == [str(port)] and f"-p {port}:{port}" in DOCKERFILE
    assert asked.call_args.args == (f"http://127.0.0.1:{port}/health",)
    assert "/health" in {path for method, path, _ in ROUTES if method == "GET"}


def test_the_image_runs_as_a_user_of_its_own_and_compiles_as_that_user():
    made = re.search(r"useradd --create-home (\w+)", DOCKERFILE)
    assert instructions("USER") == [made[1]] and made[1] != "root"
    compiling = [json.loads(line)[2] for line in instructions("RUN") if line.startswith("[")]
    assert len(compiling) == 1 and DOCKERFILE.index("USER ") < DOCKERFILE.index("import native")
    (statement, *_) = ast.parse(compiling[0]).body
    assert [hasattr(importlib.import_module(statement.module), alias.name) for alias in statement.names] == [True]


def test_the_build_sees_what_it_installs_and_no_more():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]}
    needed |= {*project["tool"]["setuptools"]["packages"]["find"]["where"], "requirements"}
    assert IGNORE[0] == "*" and {line[1:] for line in IGNORE if line.startswith("!")} == needed
    assert [name for name in needed if not (ROOT / name).exists()] == []
    assert re.findall(r"source=(\w+)", DOCKERFILE) == ["requirements"]
    assert "dev.txt" not in DOCKERFILE


@pytest.mark.parametrize("file", ["deploy/Dockerfile", "deploy/deepinfer.service", "scripts/_venv.sh", "scripts/test"])
def test_requirement_files_that_are_named_are_there(file):
    named = re.findall(r"requirements/\w[\w-]*\.txt", (ROOT / file).read_text())
    assert named and [name for name in named if not (ROOT / name).exists()] == []


def test_the_unit_starts_a_server_with_flags_that_exist():
    args = parsed(shlex.split(unit("Service")["ExecStart"]))
    assert args.run.__module__ == "deepinfer.cli.serve" and args.log_json
    assert args.config in UNIT.partition("[Unit]")[0] and args.api_key_file in comments(UNIT)
    assert f"useradd --system {unit('Service')['User']}" in UNIT
    assert f"python3 -m venv {Path(unit('Service')['ExecStart'].split()[0]).parents[1]}\n" in UNIT


def test_both_wait_until_the_server_has_drained():
    for found in (unit("Service")["TimeoutStopSec"], re.search(r"--stop-timeout (\d+)", DOCKERFILE)[1]):
        assert int(found) > ServeOptions().drain_seconds


def test_the_unit_does_not_start_again_what_refuses_its_options(capsys):
    assert main(["serve", "--port", "-1"]) == int(unit("Service")["RestartPreventExitStatus"])
    assert "port" in capsys.readouterr().err
