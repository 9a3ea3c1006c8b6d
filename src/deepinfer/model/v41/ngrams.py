"""The constants of the n-gram hashes: compressed vocabulary, primes and multipliers."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import torch

from deepinfer.errors import CheckpointError, ModelError
from deepinfer.model.v41.config import EngramConfig, ModelConfig
from deepinfer.ops.weights import NgramSpec

LONE_SPACE = "\ue000"  # stands for a token that is one space while the others are stripped
WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)  # enough for every number below 3.3e24


def ngram_spec(config: ModelConfig, folder: Path | None) -> NgramSpec:
    """The hash constants of every engram layer, in layer order.

    The token map comes from the folder's tokenizer.json. Without a folder (dummy weights), token t
    maps to t modulo the compressed vocabulary size, which spreads n-grams as well as any map.
    Raises CheckpointError when tokenizer and config disagree, ModelError when the tables are too
    small for the hashes.
    """
    engram = config.engram
    assert engram is not None, "the model has no engram layers"
    if folder is None:
        token_map = torch.arange(config.vocab_size) % engram.compressed_vocab_size
    else:
        token_map = _checked_map(folder / "tokenizer.json", config.vocab_size, engram)
    primes = _primes(engram)
    for table, sizes in zip(engram.tables, primes, strict=True):
        num_rows = sum(map(sum, sizes))
        if num_rows > table.num_rows:
            raise ModelError(
                f"text_config.engram_num_embeddings is {table.num_rows} for layer {table.layer_id}, "
                f"but its hashes reach {num_rows} rows; it must be at least that"
            )
    return NgramSpec(
        token_map=token_map,
        pad=int(token_map[engram.pad_id]),
        multipliers=tuple(_multipliers(table.layer_id, engram) for table in engram.tables),
        primes=primes,
        image_token=config.image_id,
    )


def compressed_token_map(tokenizer_file: Path) -> list[int]:
    """Token id -> id of its spelling, numbered by first use.

    Spellings that differ in case, accents, width or surrounding space are one. A token that is
    part of a character only is spelled as the vocabulary writes it.
    Raises CheckpointError when the file is no tokenizer.
    """
    from tokenizers import Regex, Tokenizer, normalizers

    try:
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"cannot read {tokenizer_file} ({error}); engram layers need the tokenizer") from error
    steps = [normalizers.NFKC(), normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()]
    steps += [normalizers.Replace(Regex(r"[ \t\r\n]+"), " "), normalizers.Replace(Regex(r"^ $"), LONE_SPACE)]
    steps += [normalizers.Strip(), normalizers.Replace(LONE_SPACE, " ")]
    normalize = normalizers.Sequence(steps).normalize_str
    ids: dict[str, int] = {}
    token_map = []
    for token in range(tokenizer.get_vocab_size(with_added_tokens=True)):
        text = tokenizer.decode([token], skip_special_tokens=False)
        spelling = tokenizer.id_to_token(token) if "\ufffd" in text else normalize(text)
        token_map.append(ids.setdefault(spelling or text, len(ids)))
    return token_map


def _checked_map(tokenizer_file: Path, vocab_size: int, engram: EngramConfig) -> torch.Tensor:
    token_map = compressed_token_map(tokenizer_file)
    size = len(set(token_map))
    if size != engram.compressed_vocab_size:
        raise CheckpointError(
            f"{tokenizer_file} has {size} different spellings, but text_config.engram_compressed_vocab_size is "
            f"{engram.compressed_vocab_size}; they must be equal, so this is another model's tokenizer"
        )
    if len(token_map) < engram.pad_id + 1:
        raise CheckpointError(f"{tokenizer_file} has no token {engram.pad_id}, which is engram_pad_token_id")
    unspelled = [token_map[engram.pad_id]] * (vocab_size - len(token_map))  # ids that the tokenizer does not use
    return torch.tensor((token_map + unspelled)[:vocab_size])


def _primes(engram: EngramConfig) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Rows per [table][n-gram size - 2][head]: the primes from vocab_size on, in order, none used twice.

    They are dspellingn for all tables of the checkpoint, also for those that a cut dropped.
    """
    primes = (number for number in itertools.count(engram.vocab_size) if is_prime(number))
    tables = [
        tuple(tuple(itertools.islice(primes, engram.num_heads)) for _ in range(engram.lookback))
        for _ in range(engram.tables[-1].position + 1)
    ]
    return tuple(tables[kept.position] for kept in engram.tables)


def _multipliers(layer_id: int, engram: EngramConfig) -> tuple[int, ...]:
    """Odd multipliers per look-back, small enough that id * multiplier fits in int64."""
    bound = max(1, (2**63 - 1) // engram.compressed_vocab_size // 2)
    dspellings = np.random.default_rng(10007 * layer_id).integers(0, bound, engram.max_ngram, np.int64)
    return tuple(2 * int(dspelling) + 1 for dspelling in dspellings)


def is_prime(number: int) -> bool:
    """Miller-Rabin with witnesses that decide every number below 3.3e24 (arXiv:1509.00864)."""
    if number < 2:
        return False
    for prime in WITNESSES:
        if number % prime == 0:
            return number == prime
    twos = ((number - 1) & (1 - number)).bit_length() - 1
    odd = (number - 1) >> twos
    for witness in WITNESSES:
        power = pow(witness, odd, number)
        if power in (1, number - 1):
            continue
        if not any((power := power * power % number) == number - 1 for _ in range(twos - 1)):
            return False
    return True
