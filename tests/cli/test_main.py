import sys

import pytest

from cli.process import run_process
from deepinfer.cli import chat
from deepinfer.cli.main import build_parser, main
from deepinfer.errors import ModelError


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["chta"], "invalid choice: 'chta'"),
        ([], "the following arguments are required: COMMAND"),
        (["chat", "--max-quue", "3"], "unknown flag --max-quue; did you mean --max-queue?"),
        (["chat", "--device", "tpu"], "argument --device: 'tpu' is not one of auto, cpu, cuda, null"),
        (["bench", "--batch-sizes", "4,0"], "'0' is not a whole number from 1 on"),
    ],
)
def test_wrong_command_line_is_one_line_and_code_2(words, message, capsys):
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("deepinfer: ") and message in captured.err
    assert captured.err.count("\n") == 1


def test_error_of_the_package_is_one_line_and_code_2(monkeypatch, capsys):
    def refuse(args):
        raise ModelError("hidden_size is 7; it must be even")

    monkeypatch.setattr(chat, "open_llm", refuse)
    assert main(["chat", "hello"]) == 2
    assert capsys.readouterr().err == "deepinfer: hidden_size is 7; it must be even\n"


def test_interrupt_ends_with_code_130_and_no_traceback(monkeypatch, capsys):
    def interrupt(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(chat, "open_llm", interrupt)
    assert main(["chat", "hello"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_engine_flags_reach_every_command_that_loads_a_model():
    for command in (["chat"], ["generate"], ["bench"], ["eval"], ["check", "determinism"]):
        args = build_parser().parse_args([*command, "--max-queue", "3", "--decoder-replay", "bounded"])
        assert (args.max_queue, args.decoder_replay) == (3, "bounded")


def test_options_prints_the_docs_page(capsys):
    assert main(["options"]) == 0
    assert "| `max_queue` | `--max-queue` | `4096` |" in capsys.readouterr().out


def test_reader_that_goes_away_leaves_no_traceback():
    command = f"{sys.executable} -m deepinfer options | head -1"
    done = run_process(["bash", "-c", command])
    assert (done.stdout, done.stderr) == ("# Options\n", "")


def test_help_does_not_load_torch():
    code = "import sys; from deepinfer.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    code += "sys.exit('torch' in sys.modules)"
    assert run_process([sys.executable, "-c", code]).returncode == 0
