"""The options page of the documentation, made from the declared fields."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from deepinfer.config.fields import Option
from deepinfer.config.variables import variables_of

HEAD = """# Options

Made by `deepinfer options` from the declared fields; do not edit by hand.

An engine option is an argument of `LLM(...)` under its own name, a flag of every command that loads
a model, and a variable; an option of the server is a flag of `deepinfer serve`, a line of its `--config` file, and a
variable. An argument or flag goes before a variable, a variable before the default.
Unknown names are errors. A sampling parameter is a field of `SamplingParams` and a flag of the
commands that generate.
"""


def options_page(engine: Mapping[str, Iterable[Option]], sampling: Iterable[Option]) -> str:
    """The whole page as Markdown: one table for each group of engine options, one for sampling."""
    parts = [HEAD]
    for title, options in engine.items():
        rows = [_row(option, ", ".join(f"`{name}`" for name in variables_of(option))) for option in options]
        parts.append(_table(title.rstrip("."), "variable", rows))
    parts.append(_table("Sampling parameters", "range", [_row(option, _range(option)) for option in sampling]))
    return "\n".join(parts)


def _table(title: str, column: str, rows: list[str]) -> str:
    head = f"| option | flag | default | {column} | meaning |\n| --- | --- | --- | --- | --- |"
    return "\n".join([f"## {title}\n", head, *rows, ""])


def _row(option: Option, extra: str) -> str:
    flag = f"`--[no-]{option.flag[2:]}`" if option.kind is bool else f"`{option.flag}`"
    return f"| `{option.name}` | {flag} | {_default(option)} | {extra} | {_meaning(option)} |"


def _default(option: Option) -> str:
    if option.default in (None, ()):
        return ""
    return f"`{str(option.default).lower() if option.kind is bool else option.default}`"


def _meaning(option: Option) -> str:
    text = option.help.replace("|", "\\|")
    return f"{text} ({', '.join(f'`{word}`' for word in option.choices)})" if option.choices else text


def _range(option: Option) -> str:
    if option.rule:
        return option.rule
    if option.low is None and option.high is None:
        return ""
    if option.high is None:
        return f"{option.low:g} or more"
    high = f"{option.high:g}" if option.high < 1e6 else f"{option.high}"
    return f"{option.low:g} to {high}"
