import json
import shutil
from pathlib import Path

import pytest

from deepinfer.errors import ModelError, RequestError
from deepinfer.frontend.tokenizer import Tokenizer


@pytest.fixture
def folder(nano, tmp_path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"):
        shutil.copy(nano / name, tmp_path / name)
    return tmp_path


def edit(file: Path, **values):
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def test_a_raw_text_is_encoded_with_the_full_vocabulary_and_without_bos(tokenizer):
    assert tokenizer.vocab_size == 4096
    assert tokenizer.eos_ids == (1,)
    assert tokenizer.bos_id is None
    assert tokenizer.encode("<｜begin▁of▁sentence｜><｜User｜>12") == [0, 4072, *tokenizer.encode("12")]
    assert tokenizer.encode("") == []


def test_decode_leaves_special_tokens_out_unless_asked(tokenizer):
    ids = [0, *tokenizer.encode("ab"), 1]
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<｜begin▁of▁sentence｜>ab<｜end▁of▁sentence｜>"


def test_text_without_utf8_form_is_refused(tokenizer):
    with pytest.raises(RequestError, match="lone surrogate"):
        tokenizer.encode("a\ud800")


def test_bos_is_added_once_when_the_tokenizer_config_says_so(folder):
    edit(folder / "tokenizer_config.json", add_bos_token=True, bos_token={"content": "<｜begin▁of▁sentence｜>"})
    tokenizer = Tokenizer(folder)
    assert tokenizer.bos_id == 0
    plain = tokenizer.encode("hello")
    assert plain[0] == 0 and 0 not in plain[1:]
    assert tokenizer.encode("<｜begin▁of▁sentence｜>hello") == plain


def test_a_bos_spelling_without_an_id_is_refused(folder):
    edit(folder / "tokenizer_config.json", add_bos_token=True, bos_token="<nope>")
    with pytest.raises(ModelError, match=r"bos_token of .*tokenizer_config.json is '<nope>'"):
        Tokenizer(folder)


def test_eos_ids_come_from_the_generation_config_first(folder):
    edit(folder / "generation_config.json", eos_token_id=[1, 2])
    assert Tokenizer(folder).eos_ids == (1, 2)
    (folder / "generation_config.json").unlink()
    edit(folder / "config.json", eos_token_id=7)
    assert Tokenizer(folder).eos_ids == (7,)
    edit(folder / "config.json", eos_token_id=None)
    assert Tokenizer(folder).eos_ids == (1,)  # of the text_config inside


def test_a_model_without_eos_is_refused(folder):
    (folder / "generation_config.json").unlink()
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match="gives eos_token_id"):
        Tokenizer(folder)


def test_other_kinds_of_tokenizer_are_refused(folder):
    edit(folder / "tokenizer.json", decoder={"type": "Metaspace"})
    with pytest.raises(ModelError, match=r"decoder of .*tokenizer.json is Metaspace; it must be ByteLevel"):
        Tokenizer(folder)


def test_missing_and_damaged_files_are_named(folder):
    (folder / "tokenizer.json").write_text('{"decoder": ')
    with pytest.raises(ModelError, match=r"tokenizer.json cannot be read .*download it again"):
        Tokenizer(folder)
    (folder / "tokenizer.json").write_text('{"decoder": {"type": "ByteLevel"}, "model": 3}')
    with pytest.raises(ModelError, match=r"tokenizer.json cannot be read as a tokenizer"):
        Tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer.json is missing"):
        Tokenizer(folder)


def test_markup_can_be_kept_where_it_is_special(folder):
    content = json.loads((folder / "tokenizer.json").read_text())
    for token in content["added_tokens"]:
        token["special"] = True
    (folder / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = Tokenizer(folder)
    ids = [4075, *tokenizer.encode("a"), 4076, 4072, 1]
    plain, marked = tokenizer.detokenizer(), tokenizer.detokenizer(keeps_markup=True)
    assert "".join(map(plain.add, ids)) == "a" == tokenizer.decode(ids)
    assert "".join(map(marked.add, ids)) == "<think>a</think>"
