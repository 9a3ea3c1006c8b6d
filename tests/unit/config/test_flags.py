import pytest

from deepinfer.config import fields
from deepinfer.config.engine import EngineConfig
from deepinfer.config.flags import Parser, add_flags, given
from deepinfer.errors import ConfigError
from deepinfer.sampling.params import SamplingParams

OPTIONS = [option for group in fields.read_groups(EngineConfig).values() for option in group]
SAMPLING = fields.read_options(SamplingParams)


def parse(*words):
    parser = Parser(prog="deepinfer test")
    add_flags(parser, "Engine", OPTIONS)
    add_flags(parser, "Sampling", SAMPLING)
    return parser.parse_args(words)


def test_only_given_flags_become_options():
    assert given(parse(), OPTIONS) == {}
    words = ("--max-queue", "9", "--layers", "0,2", "--no-async-scheduling", "--device=cpu", "--temperature", "0.5")
    assert given(parse(*words), OPTIONS) == {
        "max_queue": 9,
        "layers": (0, 2),
        "async_scheduling": False,
        "device": "cpu",
    }
    assert given(parse(*words), SAMPLING) == {"temperature": 0.5}


def test_text_list_flag_is_given_several_times():
    assert given(parse("--stop", "a,b", "--stop", "c"), SAMPLING) == {"stop": ("a,b", "c")}


def test_every_option_has_a_flag():
    help_text = Parser(prog="x")
    add_flags(help_text, "Engine", OPTIONS)
    shown = help_text.format_help()
    assert [option.flag for option in OPTIONS if option.flag not in shown] == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--max-queu", "9"), "unknown flag --max-queu; did you mean --max-queue?"),
        (("--max-que=9",), "unknown flag --max-que; did you mean --max-queue?"),
        (("--zzzzzz",), "unknown flag --zzzzzz; see deepinfer test --help"),
        (("--max-queue", "many"), "argument --max-queue: 'many' is not a whole number"),
        (("--device", "tpu"), "argument --device: 'tpu' is not one of auto, cpu, cuda, null"),
    ],
)
def test_wrong_flag_is_refused(words, message):
    with pytest.raises(ConfigError) as caught:
        parse(*words)
    assert message in str(caught.value)
