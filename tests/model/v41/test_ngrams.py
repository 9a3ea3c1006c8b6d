import dataclasses
import json
import math
import shutil
import time

import pytest

from deepinfer.errors import CheckpointError, ModelError
from deepinfer.model.v41.ngrams import compressed_token_map, is_prime, ngram_spec
from model_configs import GOLDEN, NANO, config


@pytest.fixture(scope="module")
def golden_facts() -> dict:
    return json.loads((GOLDEN.parent / "goldens" / "goldens.json").read_text())["engram"]


def test_hash_constants_equal_the_golden_ones(golden_facts):
    spec = ngram_spec(config("golden"), GOLDEN)
    assert spec.token_map.tolist() == golden_facts["token_map"]
    assert spec.pad == golden_facts["pad_id"]
    assert [[list(heads) for heads in sizes] for sizes in spec.primes] == golden_facts["primes"]
    assert [[str(number) for number in layer] for layer in spec.multipliers] == golden_facts["multipliers"]
    assert spec.image_token == 639


def test_cut_keeps_the_constants_of_the_kept_layers(golden_facts):
    spec = ngram_spec(config("golden").cut((4, 5)), GOLDEN)
    assert [[list(heads) for heads in sizes] for sizes in spec.primes] == golden_facts["primes"][1:]
    assert [[str(number) for number in layer] for layer in spec.multipliers] == golden_facts["multipliers"][1:]


def test_bundled_model_agrees_with_its_tokenizer():
    spec = ngram_spec(config("nano"), NANO)
    assert spec.token_map.shape == (4096,) and int(spec.token_map.max()) + 1 == 3176


def test_released_primes_fill_the_released_tables_in_under_two_seconds():
    start = time.thread_time()
    spec = ngram_spec(config("released"), None)
    assert time.thread_time() - start < 2
    assert [sum(map(sum, sizes)) for sizes in spec.primes] == [384_006_168, 384_016_682]
    flat = [prime for sizes in spec.primes for heads in sizes for prime in heads]
    assert flat == sorted(set(flat)) and len(flat) == 48
    assert max(multiplier for layer in spec.multipliers for multiplier in layer) < 2**63 // 99092


def test_without_a_tokenizer_ids_wrap_around_the_compressed_vocabulary():
    spec = ngram_spec(config("golden"), None)
    assert spec.token_map[[0, 553, 554, 639]].tolist() == [0, 553, 0, 85]
    assert spec.pad == 2


def test_spellings_that_look_alike_share_an_id():
    token_map = compressed_token_map(GOLDEN / "tokenizer.json")
    vocabulary = json.loads((GOLDEN / "tokenizer.json").read_text())["model"]["vocab"]
    assert token_map[vocabulary["T"]] == token_map[vocabulary["t"]]
    assert token_map[vocabulary["Ġt"]] == token_map[vocabulary["t"]]
    assert token_map[vocabulary["a"]] != token_map[vocabulary["t"]]


def test_another_models_tokenizer_is_refused():
    with pytest.raises(CheckpointError, match="has 3176 different spellings, but .* is 554; they must be equal"):
        ngram_spec(config("golden"), NANO)


def test_missing_or_damaged_tokenizer_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="cannot read .*tokenizer.json"):
        ngram_spec(config("golden"), tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="cannot read .*tokenizer.json"):
        ngram_spec(config("golden"), tmp_path)


def test_ids_past_the_tokenizer_count_as_padding(tmp_path):
    shutil.copy(GOLDEN / "tokenizer.json", tmp_path)
    wide = dataclasses.replace(config("golden"), vocab_size=700)
    spec = ngram_spec(wide, tmp_path)
    assert spec.token_map.shape == (700,) and set(spec.token_map[640:].tolist()) == {spec.pad}


def test_table_smaller_than_its_hashes_is_refused():
    golden = config("golden")
    tables = (dataclasses.replace(golden.engram.tables[0], num_rows=2513), *golden.engram.tables[1:])
    small = dataclasses.replace(golden, engram=dataclasses.replace(golden.engram, tables=tables))
    with pytest.raises(ModelError, match="engram_num_embeddings is 2513 for layer 1, but its hashes reach 2514 rows"):
        ngram_spec(small, None)


def test_is_prime_agrees_with_trial_division():
    for number in [*range(-3, 2000), *range(16_000_000, 16_000_300)]:
        divisible = any(number % divisor == 0 for divisor in range(2, math.isqrt(max(number, 0)) + 1))
        assert is_prime(number) == (number > 1 and not divisible), number


def test_is_prime_is_not_fooled_by_pseudoprimes():
    for composite in (561, 3215031751, 3825123056546413051, 2**61 + 1):
        assert not is_prime(composite)
    assert is_prime(2**61 - 1)
