"""DEEPINFER_ variables as options of the engine and of the server.

Every option has the variable DEEPINFER_<OPTION_NAME>; some also have an older DeepInfer name. A
variable that no option has is an error, never ignored; one set to the empty text counts as not set.
What is given in code or as a flag goes before a variable, and a variable before the default.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from deepinfer.config import fields
from deepinfer.config.engine import MAX_COUNT, EngineConfig, unknown_option
from deepinfer.config.fields import Option
from deepinfer.config.serve import ServeOptions
from deepinfer.env import PREFIX
from deepinfer.errors import ConfigError


def engine_config(options: Mapping[str, Any], variables: Mapping[str, str]) -> EngineConfig:
    """The settings of an engine from explicit options and, behind them, DEEPINFER_ variables.

    Raises ConfigError; where the refused value came from a variable, the message names it.
    """
    values, origins = _read(variables, engine_fields())
    try:
        return EngineConfig.from_options({**values, **options})
    except ConfigError as error:
        raise _with_variables(error, {name: origins[name] for name in origins if name not in options}) from None


def serve_options(options: Mapping[str, Any], variables: Mapping[str, str]) -> ServeOptions:
    """The settings of a server, in the same way."""
    declared = fields.read_options(ServeOptions)
    values, origins = _read(variables, declared)
    known = [option.name for option in declared]
    for name in options:
        if name not in known:
            raise unknown_option(name, known)
    try:
        return ServeOptions(**{**values, **options})
    except ConfigError as error:
        raise _with_variables(error, {name: origins[name] for name in origins if name not in options}) from None


def engine_fields() -> tuple[Option, ...]:
    """Every option of the engine, in order."""
    return tuple(option for group in fields.read_groups(EngineConfig).values() for option in group)


def options_from_environment(variables: Mapping[str, str]) -> dict[str, Any]:
    """Option values from variables, by option name.

    Raises ConfigError for an unknown name (with the nearest valid one), a value of the wrong form,
    or two variables that set one option differently. Ranges are checked by `engine_config`.
    """
    return _read(variables, engine_fields())[0]


def variables_of(option: Option) -> tuple[str, ...]:
    """The variables that set an option, DeepInfer's older name first."""
    own = PREFIX + option.name.upper()
    return tuple(dict.fromkeys((option.variable or own, own)))


def _read(variables: Mapping[str, str], wanted: Sequence[Option]) -> tuple[dict[str, Any], dict[str, str]]:
    """(values of the wanted options, the variable that each came from), both by option name."""
    options = (*engine_fields(), *fields.read_options(ServeOptions))
    known = {variable: option for option in options for variable in variables_of(option)}
    names = {option.name for option in wanted}
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for variable, text in variables.items():
        if variable not in known:
            raise _unknown(variable, list(known))
        if not text:
            continue
        option = known[variable]
        if option.name not in names:
            continue
        value = _value(variable, option, text)
        if option.name in values and values[option.name] != value:
            raise ConfigError(
                f"{origins[option.name]} and {variable} set {option.name} to different values; set one of them"
            )
        values[option.name], origins[option.name] = value, variable
    return values, origins


def _value(variable: str, option: Option, text: str) -> Any:
    try:
        if variable in _OLDER_FORMS:
            return _OLDER_FORMS[variable](text)
        return fields.parse(option, text)
    except ConfigError as error:
        raise ConfigError(f"the variable {variable} sets {option.name}: {error}") from None


def _words(**meanings: Any) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        if text.strip().lower() not in meanings:
            raise ConfigError(f"{text!r} is not one of {', '.join(meanings)}")
        return meanings[text.strip().lower()]

    return read


def _num_drafts(text: str) -> int | None:
    """A switch, as DeepInfer has it: on = as many as the draft head makes. A number from 2 on is taken as such."""
    if text.strip().isdecimal() and text.strip() not in ("0", "1"):
        return int(text) if len(text) < 10 else MAX_COUNT
    return None if fields.parse_switch(text) else 0


# DeepInfer's values, where they differ from the option's. `mask` and `compact` are two ways to compute
# the same function; this engine always computes only the kept tokens.
_OLDER_FORMS: dict[str, Callable[[str], Any]] = {
    "DEEPINFER_ACCELERATOR": _words(auto="auto", cpu="cpu", cuda="cuda", gpu="cuda", null="null"),
    "DEEPINFER_USE_NEXTN_DECODE": _num_drafts,
    "DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE": _words(off="full", mask="bounded", compact="bounded"),
}


def _unknown(variable: str, known: list[str]) -> ConfigError:
    words = [name.removeprefix(PREFIX) for name in known]
    near = difflib.get_close_matches(variable.removeprefix(PREFIX), words, n=1, cutoff=0.6)
    hint = f"did you mean {PREFIX}{near[0]}?" if near else f"known are {', '.join(sorted(known))}"
    return ConfigError(f"unknown variable {variable}; {hint}")


def _with_variables(error: ConfigError, origins: Mapping[str, str]) -> ConfigError:
    named = [f"the variable {origins[name]} sets {name}" for name in origins if re.search(rf"\b{name}\b", str(error))]
    return ConfigError(f"{error} ({'; '.join(named)})") if named else error
