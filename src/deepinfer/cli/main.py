"""`deepinfer`: the commands, and the one place that turns errors into a line and an exit code.

Exit codes: 0 done, 1 done but some requests failed or a check found a difference, 2 refused (one line says
why), 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from deepinfer.__about__ import __version__
from deepinfer.cli import bench, chat, check, eval, generate, info, options, serve
from deepinfer.config.flags import Parser
from deepinfer.errors import DeepInferError


def build_parser() -> Parser:
    """The parser of the whole command line; each command module adds itself."""
    parser = Parser(prog="deepinfer", description="Inference engine for DeepSeek-V4.1.")
    parser.add_argument("--version", action="version", version=f"deepinfer {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (chat, generate, serve, info, bench, eval, check, options):
        command.add_command(commands)
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Run one command; `words` are the arguments, those of the process by default. Returns the exit code."""
    try:
        words = serve.resolve_aliases(sys.argv[1:] if words is None else words)
        args = build_parser().parse_args(words)
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except DeepInferError as error:
        print(f"deepinfer: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ndeepinfer: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader went away, as in `deepinfer generate ... | head`: end quietly, flushing to nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
