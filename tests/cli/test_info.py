import json
import shutil
import sys
from pathlib import Path

import pytest

from cli.process import run_process
from deepinfer.cli.main import main

FLASH_CONFIG = Path(__file__).parents[1] / "config-flash.json"


@pytest.fixture
def flash(tmp_path):
    """A folder with the released config and no weights."""
    shutil.copy(FLASH_CONFIG, tmp_path / "config.json")
    return str(tmp_path)


def test_released_config_needs_890_cache_bytes_a_token(flash, capsys):
    assert main(["info", flash, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert list(result) == ["model"]
    assert result["model"]["bytes_per_token"] == 890
    assert len(result["model"]["layers"]) == 40


def test_plan_follows_device_size_ranks_and_context(flash, capsys):
    words = ["info", flash, "--json", "--device-gib", "141", "--context", "4096"]
    assert main([*words, "--ranks", "8"]) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert (plan["num_ranks"], plan["context_tokens"], plan["fits"]) == (8, 4096, True)
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["cache_bytes"] < plan["cache_bytes"]


def test_text_report_shows_schedule_and_cache_bytes(flash, capsys):
    assert main(["info", flash, "--device-gib", "141"]) == 0
    out = capsys.readouterr().out
    assert "890 B" in out and "reindex" in out and "reserved for activations" in out


def test_layers_cut_the_model(flash, capsys):
    assert main(["info", flash, "--json", "--layers", "0,2,20"]) == 0
    layers = json.loads(capsys.readouterr().out)["model"]["layers"]
    assert [layer["layer_id"] for layer in layers] == [0, 2, 20]


def test_default_is_the_small_model(capsys):
    assert main(["info", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["model"]["layers"]) == 12


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "2"], "give --device-gib too"),
        (["--device-gib", "-1"], "it must be above 0"),
        (["/nowhere/at/all"], "there is no such folder"),
        (["--layers", "99"], "99"),
    ],
)
def test_question_without_an_answer_is_refused(words, message, capsys):
    assert main(["info", *words]) == 2
    assert message in capsys.readouterr().err


def test_info_does_not_load_torch():
    code = "import sys; from deepinfer.cli.main import main; main(['info']); sys.exit('torch' in sys.modules)"
    assert run_process([sys.executable, "-c", code]).returncode == 0
