import pytest

from deepinfer.config import fields
from deepinfer.config.engine import EngineConfig, declared
from deepinfer.config.variables import engine_config, options_from_environment, variables_of
from deepinfer.errors import ConfigError


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("DEEPINFER_HF_MODEL_DIR", "/models/flash", "model", "/models/flash"),
        ("DEEPINFER_ACCELERATOR", "gpu", "device", "cuda"),
        ("DEEPINFER_ACCELERATOR", "CPU", "device", "cpu"),
        ("DEEPINFER_USE_NEXTN_DECODE", "off", "num_draft_tokens", 0),
        ("DEEPINFER_ENABLE_MTP_VARLEN", "0", "draft_scheduling", False),
        ("DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE", "off", "decoder_replay", "full"),
        ("DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE", "mask", "decoder_replay", "bounded"),
        ("DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE", "compact", "decoder_replay", "bounded"),
        ("DEEPINFER_YOCO_PREFILL_KEEP_TOKENS", "200", "replay_keep_tokens", 200),
        ("DEEPINFER_BATCH_INVARIANT", "false", "batch_invariant", False),
        ("DEEPINFER_ENFORCE_EAGER", "1", "enforce_eager", True),
        ("DEEPINFER_LAYERS", "0,2,20", "layers", (0, 2, 20)),
    ],
)
def test_variable_sets_its_option(variable, text, name, value):
    assert options_from_environment({variable: text}) == {name: value}


def test_every_option_has_a_variable_of_its_own_name():
    options = [option for group in fields.read_groups(EngineConfig).values() for option in group]
    for option in options:
        assert f"DEEPINFER_{option.name.upper()}" in variables_of(option)
        assert len(set(variables_of(option))) == len(variables_of(option))
    assert len(options) == len(declared())


def test_empty_variable_counts_as_not_set():
    assert options_from_environment({"DEEPINFER_MODEL": "", "DEEPINFER_MAX_QUEUE": "5"}) == {"max_queue": 5}


def test_unknown_variable_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match="unknown variable DEEPINFER_MAX_QUEU; did you mean DEEPINFER_MAX_QUEUE?"):
        options_from_environment({"DEEPINFER_MAX_QUEU": "5"})
    with pytest.raises(ConfigError, match="unknown variable DEEPINFER_XYZZY_PLUGH; known are DEEPINFER_ACCELERATOR"):
        options_from_environment({"DEEPINFER_XYZZY_PLUGH": ""})


def test_wrong_value_names_the_variable_the_option_and_the_rule():
    message = "the variable DEEPINFER_ACCELERATOR sets device: 'tpu' is not one of auto, cpu, cuda, gpu, null"
    with pytest.raises(ConfigError, match=message):
        options_from_environment({"DEEPINFER_ACCELERATOR": "tpu"})


def test_two_variables_of_one_option_must_agree():
    same = {"DEEPINFER_HF_MODEL_DIR": "a", "DEEPINFER_MODEL": "a"}
    assert options_from_environment(same) == {"model": "a"}
    with pytest.raises(ConfigError, match="DEEPINFER_HF_MODEL_DIR and DEEPINFER_MODEL set model to different values"):
        options_from_environment({**same, "DEEPINFER_MODEL": "b"})


@pytest.mark.parametrize(("text", "wanted"), [("1", None), ("true", None), ("0", 0), ("off", 0), ("3", 3)])
def test_the_switch_for_drafts_also_takes_their_number(text, wanted):
    config = engine_config({}, {"DEEPINFER_USE_NEXTN_DECODE": text, "DEEPINFER_ENABLE_MTP_VARLEN": "0"})
    assert config.speculate.num_draft_tokens == wanted and not config.speculate.draft_scheduling


def test_explicit_option_goes_before_variable_and_variable_before_default():
    config = engine_config({"max_queue": 7}, {"DEEPINFER_MAX_QUEUE": "8", "DEEPINFER_MAX_MODEL_LEN": "100"})
    assert (config.scheduler.max_queue, config.model.max_model_len) == (7, 100)
    assert config.model.replay_keep_tokens == 140


def test_explicit_option_can_mend_what_a_variable_alone_would_break():
    config = engine_config({"max_num_requests": 4}, {"DEEPINFER_MAX_STEP_TOKENS": "16"})
    assert (config.scheduler.max_step_tokens, config.scheduler.max_num_requests) == (16, 4)


def test_error_about_an_explicit_option_does_not_blame_a_variable():
    with pytest.raises(ConfigError) as caught:
        engine_config({"max_queue": 0}, {"DEEPINFER_MAX_QUEUE": "8"})
    assert str(caught.value) == "max_queue is 0; it must be at least 1"
