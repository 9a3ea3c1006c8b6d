"""`deepinfer serve`: the HTTP server."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from deepinfer import env, log
from deepinfer.cli.common import add_engine_flags, engine_options, read_text
from deepinfer.config import fields, flags
from deepinfer.config.serve import ServeOptions
from deepinfer.config.variables import engine_config, serve_options
from deepinfer.errors import ConfigError

# Flags of other engines for the same thing.
ALIASES = {
    "--max-num-seqs": "--max-num-requests",
    "--max-running-requests": "--max-num-requests",
    "--max-num-batched-tokens": "--max-step-tokens",
    "--chunked-prefill-size": "--max-prefill-tokens",
    "--context-length": "--max-model-len",
    "--max-queued-requests": "--max-queue",
    "--num-gpu-blocks-override": "--num-blocks",
    "--kv-cache-memory-bytes": "--kv-cache-bytes",
    "--allowed-origins": "--allowed-origin",
    "--allowed-media-domains": "--allowed-image-domain",
    "--model-path": "--model",
    "--watchdog-timeout": "--stuck-seconds",
}


def add_command(commands: Any) -> None:
    """Add the command and its flags to the parser."""
    parser = commands.add_parser("serve", help="serve a model over HTTP", description=__doc__)
    parser.add_argument("model_path", nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument("--config", metavar="FILE", help="options from a YAML file; flags go before it")
    flags.add_flags(parser, str(ServeOptions.__doc__), fields.read_options(ServeOptions))
    add_engine_flags(parser)
    parser.set_defaults(run=run, log_level="info")


def run(args: argparse.Namespace) -> int:
    """Serve until a signal ends it."""
    try:
        from deepinfer.serve.run import serve
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the server needs the package {error.name}; install deepinfer with its extra `serve`"
        ) from None

    declared = fields.read_options(ServeOptions)
    from_file = {} if args.config is None else read_config(args.config)
    given = from_file | engine_options(args) | flags.given(args, declared)
    if args.model_path is not None and given.setdefault("model", args.model_path) != args.model_path:
        raise ConfigError(f"MODEL is {args.model_path!r} and model is {given['model']!r}; give one of them")
    names = {option.name for option in declared}
    variables = env.deepinfer_variables()
    options = serve_options({name: value for name, value in given.items() if name in names}, variables)
    engine = engine_config({name: value for name, value in given.items() if name not in names}, variables)
    log.setup(args.log_level, is_json=options.log_json)
    return serve(engine, options, log_level=args.log_level)


def read_config(path: str) -> dict[str, Any]:
    """The options in a YAML file, by their names or flags, other engines' names included. Raises ConfigError."""
    import yaml

    try:
        content = yaml.safe_load(read_text(path))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is no YAML: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise ConfigError(f"{path} must hold options, one a line, as in 'port: 8000'")
    result = {}
    for name, value in content.items():
        (flag,) = resolve_aliases(["serve", "--" + name.replace("_", "-")])[1:]
        result[flag[2:].replace("-", "_")] = tuple(value) if isinstance(value, list) else value
    return result


def resolve_aliases(words: Sequence[str]) -> list[str]:
    """The command line with this engine's names for `serve`, each change told on standard error."""
    if words[:1] != ["serve"]:
        return [*words]
    result = []
    for word in words:
        flag, equals, value = word.partition("=")
        own = ALIASES.get(flag)
        if own is not None:
            print(f"deepinfer: {flag} is {own} here", file=sys.stderr)
        result.append(word if own is None else own + equals + value)
    return result
