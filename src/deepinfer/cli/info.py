"""`deepinfer info`: a model's schedule, parameters, bytes, cache sizes and memory plan, from its config alone."""

from __future__ import annotations

import argparse
import json
from typing import Any

from deepinfer.checkpoint.hub import resolve
from deepinfer.cli.common import engine_options
from deepinfer.config import fields, flags
from deepinfer.config.engine import ModelOptions
from deepinfer.errors import ConfigError
from deepinfer.model.registry import architecture_of, load_module


def add_command(commands: Any) -> None:
    """Add the command and its flags to the parser."""
    parser = commands.add_parser("info", help="schedule, parameters, bytes and memory plan of a model")
    parser.add_argument(
        "path", nargs="?", metavar="PATH|ID", help="checkpoint folder or hub id; default: the small model"
    )
    parser.add_argument("--device-gib", type=float, metavar="GIB", help="also plan the memory of devices of this size")
    parser.add_argument("--ranks", type=int, help="devices that share the model (default: 1)")
    parser.add_argument("--context", type=int, metavar="TOKENS", help="length of a request; default: the model's limit")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = fields.by_name(fields.read_options(ModelOptions))
    flags.add_flags(parser, "Which model", (options["revision"], options["layers"]))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the report, and the memory plan when a device size is given."""
    if args.device_gib is None and (args.ranks is not None or args.context is not None):
        raise ConfigError("--ranks and --context belong to a memory plan; give --device-gib too")
    architecture, config = read_config(args)
    parts = {"model": load_module(architecture, "report").model_report(config)}
    if args.device_gib is not None:
        plan = load_module(architecture, "memory_plan").memory_plan
        parts["plan"] = plan(config, args.device_gib, 1 if args.ranks is None else args.ranks, args.context)
    if args.json:
        print(json.dumps({name: part.as_dict() for name, part in parts.items()}))
    else:
        print("\n\n".join(part.as_text() for part in parts.values()))
    return 0


def read_config(args: argparse.Namespace) -> tuple[str, Any]:
    """(architecture, its checked config), cut to the layers that the flags name."""
    options = engine_options(args)
    folder = resolve(args.path, options.get("revision"), config_only=True)
    architecture = architecture_of(folder)
    config = load_module(architecture, "config").ModelConfig.from_file(folder)
    return architecture, config.cut(options["layers"]) if "layers" in options else config
