"""From what a caller gives to a GenerateRequest whose limits are checked."""

from __future__ import annotations

import dataclasses
import operator
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from deepinfer.errors import RequestError, shown
from deepinfer.frontend.bad_words import bad_word_ids
from deepinfer.frontend.images import PromptImage, listed_images, multi_modal_images, place_images
from deepinfer.frontend.tokenizer import NoTokenizer, Tokenizer
from deepinfer.images.prepare import ImagePreparer
from deepinfer.messages import GenerateRequest
from deepinfer.sampling.params import MAX_GOLDEN_TOKENS, SamplingParams

# A raw text, token ids, or one of the two by name: {"prompt": text} or {"prompt_token_ids": ids}. With a name
# there may be images, one for each image token of the prompt: "images" or DeepInfer's "multi_modal_data".
Prompt: TypeAlias = str | Iterable[int] | Mapping[str, Any]
PROMPT_KEYS = ("prompt", "prompt_token_ids")
IMAGE_KEYS = {"images": listed_images, "multi_modal_data": multi_modal_images}
NO_PROMPTS = (str, bytes, bytearray, memoryview, Mapping, Set)  # though their items may be whole numbers
MAX_PRIORITY = 2**31 - 1


@dataclass(frozen=True)
class RequestBuilder:
    """Makes requests for one model.

    vocab_size: ids from 0 to below it are valid; the model's, which may be padded.
    max_model_len: most tokens of prompt and answer together.
    num_cache_tokens: tokens that fit into all cache blocks; None = not known.
    images: prepares images; None = the model takes none.
    """

    tokenizer: Tokenizer | NoTokenizer
    vocab_size: int
    max_model_len: int
    num_cache_tokens: int | None = None
    images: ImagePreparer | None = None

    def build(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str,
        priority: int = 0,
        wants_prompt_logits: bool = False,
        images: Sequence[PromptImage] = (),
        lowers_max_tokens: bool = False,
    ) -> GenerateRequest:
        """Encode and check a prompt.

        images: in the order of their tokens; those that the prompt itself brings come instead.
        lowers_max_tokens: a `max_tokens` that does not fit behind the prompt becomes what fits.

        A text is encoded by `Tokenizer.encode`: special spellings in it count, and BOS is added
        only if the model's tokenizer_config.json says so. `max_tokens` None becomes what fits
        behind the prompt, and never more than there are golden tokens; `seed` None becomes a random
        seed.

        Raises RequestError naming the first thing that cannot be accepted.
        """
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params is a {type(params).__name__}; it must be SamplingParams")
        params.check_ids(self.vocab_size)
        prompt, own_images = _split_images(prompt)
        given, most = own_images or images, self.max_model_len - 1
        token_ids, spans = place_images(self._token_ids(prompt), given, self.images, most)
        max_tokens = params.max_tokens
        if max_tokens is not None and lowers_max_tokens:
            max_tokens = min(max_tokens, max(1, self.max_model_len - len(token_ids)))
        if params.golden_token_ids is not None:
            max_tokens = min(len(params.golden_token_ids), max_tokens or MAX_GOLDEN_TOKENS)
        return GenerateRequest(
            request_id=request_id,
            token_ids=np.array(token_ids, np.int32),
            params=dataclasses.replace(
                params,
                max_tokens=self._max_tokens(len(token_ids), max_tokens),
                seed=secrets.randbits(63) if params.seed is None else params.seed,
            ),
            arrival=time.monotonic(),
            priority=_priority(priority),
            wants_prompt_logits=wants_prompt_logits,
            bad_word_ids=bad_word_ids(params.bad_words, self.tokenizer, self.vocab_size),
            images=spans,
        )

    def spelled_out(self, token_ids: list[int], images: Sequence[PromptImage]) -> list[int]:
        """The tokens of a prompt as the model takes it, however many. Raises RequestError."""
        return place_images(token_ids, images, self.images, max_tokens=None)[0]

    def _token_ids(self, prompt: Prompt) -> list[int]:
        name, prompt = _unwrap(prompt)
        if isinstance(prompt, str) and name != "prompt_token_ids":
            ids = self.tokenizer.encode(prompt)
        elif name == "prompt" or isinstance(prompt, NO_PROMPTS) or not _has_items(prompt):
            rule = {"prompt": "a text", "prompt_token_ids": "a list of token ids"}.get(
                name, 'a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}'
            )
            raise RequestError(f"{name or 'prompt'} is {shown(prompt)}; it must be {rule}")
        else:
            ids = [_token_id(token) for token in prompt]
        if not ids:
            raise RequestError("prompt is empty; give at least one token")
        for bad in (min(ids), max(ids)):
            if not 0 <= bad < self.vocab_size:
                raise RequestError(
                    f"prompt holds token id {shown(bad)}; ids of this model are 0 to {self.vocab_size - 1}"
                )
        return ids

    def _max_tokens(self, num_prompt_tokens: int, max_tokens: int | None) -> int:
        """Raises RequestError if prompt and answer do not fit in `max_model_len`."""
        room = self.max_model_len - num_prompt_tokens
        if room < 1:
            raise RequestError(
                f"prompt has {num_prompt_tokens} tokens but must have at most {self.max_model_len - 1}, so that "
                f"one token fits behind it in max_model_len ({self.max_model_len}); shorten it or raise --max-model-len"
            )
        if max_tokens is None:
            return room if self.num_cache_tokens is None else self._what_fits(num_prompt_tokens, room)
        if max_tokens > room:
            raise RequestError(
                f"max_tokens is {shown(max_tokens)} but prompt ({num_prompt_tokens} tokens) + max_tokens must be <= "
                f"{self.max_model_len}; lower max_tokens to {room} or raise --max-model-len"
            )
        return max_tokens

    def _what_fits(self, num_prompt_tokens: int, room: int) -> int:
        """The longest answer that the cache can hold; the last token of an answer takes no place in it.

        At least 1: what does not fit even so is refused by the engine, which knows its blocks.
        """
        assert self.num_cache_tokens is not None
        return max(1, min(room, self.num_cache_tokens + 1 - num_prompt_tokens))


def _split_images(prompt: Prompt) -> tuple[Prompt, list[PromptImage]]:
    """A prompt and the images that it brings."""
    if not isinstance(prompt, Mapping) or not (given := [key for key in IMAGE_KEYS if key in prompt]):
        return prompt, []
    if len(given) > 1:
        raise RequestError(f"prompt has {' and '.join(given)}; give the images in one way")
    rest = {key: value for key, value in prompt.items() if key != given[0]}
    return rest, IMAGE_KEYS[given[0]](prompt[given[0]])


def _unwrap(prompt: Prompt) -> tuple[str, Prompt]:
    """The key that named the prompt ("" if none did) and its value."""
    if not isinstance(prompt, Mapping):
        return "", prompt
    if len(prompt) != 1 or next(iter(prompt)) not in PROMPT_KEYS:
        keys = ", ".join(map(shown, prompt)) or "none"
        raise RequestError(f"prompt has the keys {keys}; it must have exactly one of {', '.join(PROMPT_KEYS)}")
    ((name, value),) = prompt.items()
    return name, value


def _has_items(value: object) -> bool:
    try:
        iter(value)  # type: ignore[call-overload]
    except TypeError:  # also an array of no dimension
        return False
    return True


def _token_id(token: object) -> int:
    """Python and numpy integers, and whatever else is an exact integer; not booleans."""
    if type(token) is int:
        return token
    try:
        if not isinstance(token, bool):
            return operator.index(token)  # type: ignore[arg-type]
    except TypeError:
        pass
    raise RequestError(f"prompt holds {shown(token)} among its token ids; each must be a whole number")


def _priority(priority: object) -> int:
    if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > MAX_PRIORITY:
        raise RequestError(
            f"priority is {shown(priority)}; it must be a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}"
        )
    return priority
