import io
from types import SimpleNamespace

import pytest

from cli.fake_llm import FakeLLM
from deepinfer.cli.chat import Chat, converse, describe_speed
from deepinfer.cli.main import main
from deepinfer.cli.screen import DIM, NORMAL, Screen
from deepinfer.errors import EngineDeadError, RequestError
from deepinfer.sampling.params import SamplingParams


class Terminal(io.StringIO):
    def isatty(self):
        return True


def chat_with(*deltas, out=None, **settings):
    return Chat(FakeLLM(deltas=list(deltas)), SamplingParams(), Screen(out or io.StringIO()), **settings)


def test_prompt_on_the_command_line_is_answered_once(llm, capsys, monkeypatch):
    monkeypatch.setattr("deepinfer.cli.chat.time", SimpleNamespace(monotonic=iter([1.0, 1.25, 1.75]).__next__))
    llm.deltas = [("", "Yere"), ("", "van")]
    assert main(["chat", "capital", "of", "Armenia?", "--temperature", "0.5"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "Yerevan\n"
    assert captured.err.startswith("2 tokens, first after 0.25 s, then 2.0 tokens/s")
    _, messages, params, thinking, effort = llm.calls[0]
    assert messages == [{"role": "user", "content": "capital of Armenia?"}]
    assert (params.temperature, thinking, effort) == (0.5, False, None)


def test_lines_of_a_pipe_are_turns_of_one_conversation(llm, type_in, capsys):
    llm.deltas = [("", "yes")]
    type_in("one\n\ntwo\n")
    assert main(["chat", "--system", "Be brief.", "--thinking"]) == 0
    assert capsys.readouterr().out == "yes\nyes\n"
    assert llm.calls[1][1] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "two"},
    ]
    assert llm.calls[1][3] is True


def test_thinking_is_marked_by_words_outside_a_terminal():
    out = io.StringIO()
    chat_with(("5+4", ""), ("=9.", ""), ("", "9"), out=out).answer("5+4?")
    assert out.getvalue() == "[thinking] 5+4=9.\n[answer] 9\n"


def test_thinking_is_dim_on_a_terminal():
    out = Terminal()
    chat_with(("hm", ""), ("", "9"), out=out).answer("5+4?")
    assert out.getvalue() == f"{DIM}hm{NORMAL}\n\n9\n"


def test_reset_keeps_the_system_prompt_and_forgets_the_rest():
    chat = chat_with(("", "yes"))
    chat.set_system("Be brief.")
    chat.answer("one")
    assert chat.command("/reset")
    assert chat.messages == [{"role": "system", "content": "Be brief."}]


def test_commands_change_the_chat():
    chat = chat_with()
    assert chat.command("/think on") and chat.thinking
    assert chat.command("/think off") and not chat.thinking
    assert chat.command("/system You are kind.") and chat.messages[0]["content"] == "You are kind."
    assert chat.command("/system") and chat.messages == []
    assert not chat.command("/exit")


@pytest.mark.parametrize(
    ("line", "words"),
    [("/rest", "did you mean /reset?"), ("/zzz", "see /help"), ("/think maybe", "on or off"), ("/help", "/reset")],
)
def test_command_explains_itself(line, words, capsys):
    assert chat_with().command(line)
    assert words in capsys.readouterr().err


def test_refused_turn_is_forgotten_and_the_next_is_answered(type_in, capsys):
    chat = chat_with(RequestError("prompt has 9000 tokens; at most 8192 fit"))
    type_in("long\n")
    assert converse(chat, is_terminal=False) == 1
    assert "9000 tokens" in capsys.readouterr().err
    assert chat.messages == []
    chat.llm.deltas = [("", "yes")]
    type_in("short\n")
    assert converse(chat, is_terminal=False) == 0
    assert [message["content"] for message in chat.messages] == ["short", "yes"]


def test_interrupt_stops_the_answer_and_not_the_chat(monkeypatch, capsys):
    lines = iter(["one", "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    chat = chat_with(("", "begun"), KeyboardInterrupt())
    assert converse(chat, is_terminal=True) == 0
    assert chat.messages == []
    assert "this turn is forgotten" in capsys.readouterr().err
    assert chat.screen.out.getvalue() == "begun\n"


def test_dead_engine_ends_the_chat(type_in):
    type_in("one\n")
    with pytest.raises(EngineDeadError):
        converse(chat_with(EngineDeadError("the engine stopped")), is_terminal=False)


def test_speed_counts_the_tokens_after_the_first():
    assert describe_speed(11, 0.5, 2.0) == "11 tokens, first after 0.50 s, then 5.0 tokens/s"
    assert describe_speed(1, 0.25, 0.0) == "1 token, first after 0.25 s"


def test_a_conversation_goes_on_from_one_answer(llm, capsys):
    assert main(["chat", "--n", "2", "--temperature", "1", "hi"]) == 2
    assert "n is 2, but a conversation goes on from one answer" in capsys.readouterr().err


def test_attached_images_belong_to_the_next_message_only(llm, type_in, capsys, tmp_path):
    llm.deltas = [("", "red")]
    (tmp_path / "a.png").write_bytes(b"first")
    (tmp_path / "b c.png").write_bytes(b"second")
    type_in(f"/image {tmp_path}/b c.png\nWhich colour?\nAnd now?\n")
    assert main(["chat", "--image", str(tmp_path / "a.png")]) == 0
    parts = [{"type": "image", "image": b"first"}, {"type": "image", "image": b"second"}]
    question = {"role": "user", "content": [{"type": "text", "text": "Which colour?"}, *parts]}
    assert llm.calls[0][1] == [question]
    assert llm.calls[1][1] == [
        question,
        {"role": "assistant", "content": "red"},
        {"role": "user", "content": "And now?"},
    ]
    assert "the next message shows" in capsys.readouterr().err


def test_an_image_that_cannot_be_read_is_told(llm, type_in, capsys):
    llm.deltas = [("", "yes")]
    type_in("/image /no/such.png\nhello\n")
    assert main(["chat"]) == 0
    assert "image ('/no/such.png') is no file" in capsys.readouterr().err
    assert llm.calls[0][1] == [{"role": "user", "content": "hello"}]
    assert main(["chat", "--image", "/no/such.png", "hello"]) != 0
