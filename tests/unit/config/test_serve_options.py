import pytest

from deepinfer.config.serve import ServeOptions
from deepinfer.config.variables import engine_config, serve_options
from deepinfer.errors import ConfigError


def test_options_come_from_arguments_then_variables_then_defaults():
    variables = {"DEEPINFER_PORT": "9000", "DEEPINFER_API_KEY": "a,b", "DEEPINFER_MAX_QUEUE": "7"}
    options = serve_options({"host": "::1"}, variables)
    assert (options.host, options.port, options.api_key, options.strict_fields) == ("::1", 9000, ("a", "b"), False)
    assert engine_config({}, variables).scheduler.max_queue == 7


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"port": -1}, "port is -1; it must be a whole number from 0 to 65535"),
        ({"port": True}, "port is True"),
        ({"request_seconds": 0}, "request_seconds is 0"),
        ({"stuck_seconds": 4}, "stuck_seconds is 4; it must be a number above 4"),
        ({"drain_seconds": "long"}, "drain_seconds is 'long'"),
        ({"default_effort": "huge"}, "default_effort is 'huge'"),
        ({"strict_fields": 1}, "strict_fields is 1"),
        ({"api_key": ("a",), "api_key_file": "b"}, "two ways to give keys"),
        ({"api_key": ("with space",)}, "api_key must be texts of printable characters"),
        ({"max_body_bytes": 1}, "max_body_bytes is 1"),
        ({"prot": 1}, "did you mean 'port'"),
    ],
)
def test_a_wrong_value_is_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        serve_options(options, {})


def test_a_key_is_never_part_of_a_message():
    with pytest.raises(ConfigError) as caught:
        ServeOptions(api_key=("secret key",))
    assert "secret" not in str(caught.value)
