"""`deepinfer options`: every option of the engine, the server and sampling, as the Markdown page of the docs."""

from __future__ import annotations

import argparse
from typing import Any

from deepinfer.config import fields
from deepinfer.config.docs import options_page
from deepinfer.config.engine import EngineConfig
from deepinfer.config.serve import ServeOptions
from deepinfer.sampling.params import SamplingParams


def add_command(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("options", help="list every option with its flag, variable and default")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    print(page(), end="")
    return 0


def page() -> str:
    """The whole page."""
    groups = fields.read_groups(EngineConfig) | {str(ServeOptions.__doc__): fields.read_options(ServeOptions)}
    return options_page(groups, fields.read_options(SamplingParams))
