from dataclasses import dataclass
from typing import Literal

import pytest

from deepinfer.config import fields
from deepinfer.config.engine import EngineConfig, ModelOptions, declared, option
from deepinfer.errors import ConfigError
from deepinfer.sampling.checks import TokenBias
from deepinfer.sampling.params import SamplingParams


@dataclass(frozen=True)
class Example:
    """Made up."""

    count: int | None = option(None, "a count")
    share: float = option(0.5, "a share")
    mode: Literal["a", "b"] = option("a", "a mode", variable="DEEPINFER_MODE")
    ids: tuple[int, ...] | None = option(None, "some ids")
    biases: tuple[TokenBias, ...] = option((), "some biases")
    is_on: bool = option(False, "a switch")


EXAMPLE = fields.by_name(fields.read_options(Example))


def test_read_options_resolves_types():
    assert EXAMPLE["count"].kind is int and not EXAMPLE["count"].is_list
    assert EXAMPLE["mode"].choices == ("a", "b") and EXAMPLE["mode"].variable == "DEEPINFER_MODE"
    assert EXAMPLE["ids"].kind is int and EXAMPLE["ids"].is_list
    assert EXAMPLE["is_on"].flag == "--is-on"


def test_read_groups_covers_every_declared_engine_option():
    groups = fields.read_groups(EngineConfig)
    assert [option.name for group in groups.values() for option in group] == [spec.name for spec in declared()]
    assert list(groups)[0] == ModelOptions.__doc__


def test_read_options_keeps_ranges_of_sampling_parameters():
    top_p = fields.by_name(fields.read_options(SamplingParams))["top_p"]
    assert (top_p.low, top_p.high, top_p.default) == (0.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("count", "12", 12),
        ("share", "0.25", 0.25),
        ("mode", "b", "b"),
        ("ids", "0, 2,20", (0, 2, 20)),
        ("biases", "3:-1.5, 7:2", (TokenBias(3, -1.5), TokenBias(7, 2.0))),
        ("is_on", "Yes", True),
        ("is_on", "0", False),
    ],
)
def test_parse_gives_the_value(name, text, value):
    parsed = fields.parse(EXAMPLE[name], text)
    assert parsed == value and type(parsed) is type(value)


@pytest.mark.parametrize(
    ("name", "text", "rule"),
    [
        ("count", "1.5", "'1.5' is not a whole number"),
        ("share", "half", "'half' is not a number"),
        ("mode", "c", "'c' is not one of a, b"),
        ("ids", "1,,2", "'' is not a whole number"),
        ("biases", "3", "'3' is not token_id:bias"),
        ("biases", "3:x", "'x' is not a number"),
        ("is_on", "maybe", "'maybe' is not one of 1, true"),
    ],
)
def test_parse_names_the_rule_that_a_text_breaks(name, text, rule):
    with pytest.raises(ConfigError, match=rule):
        fields.parse(EXAMPLE[name], text)


def test_a_parameter_of_many_parts_is_given_as_json_text():
    form = fields.by_name(fields.read_options(SamplingParams))["structured_outputs"]
    text = fields.parse(form, '{"regex": "a+"}')
    assert SamplingParams(structured_outputs=text) == SamplingParams(structured_outputs={"regex": "a+"})
