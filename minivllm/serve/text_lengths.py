"""Refuses texts that are too long for a model before tokenizing them, which takes seconds while others wait."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from minivllm.errors import no_room, which_of
from minivllm.models.tokenizer import ByteTokenizer
from minivllm.rounding import cdiv

if TYPE_CHECKING:
    from minivllm.models.tokenizer import Tokenizer


class TextLengths:
    """A lower bound on token counts, from the tokenizer's longest token."""

    def __init__(self, tokenizer: Tokenizer, max_model_len: int) -> None:
        self._tokenizer, self._max_model_len = tokenizer, max_model_len

    @cached_property
    def longest(self) -> int | None:
        return longest_token(self._tokenizer)

    def check(self, prompts: Sequence[object]) -> None:
        """Check text prompts. Raises ContextLengthError, as the engine does, for the first that is too long."""
        for i, text in enumerate(prompts):
            if not isinstance(text, str) or 4 * len(text) < self._max_model_len:  # a character has at most 4 bytes
                continue
            if self.longest is None:
                return
            most = (self._max_model_len - 1) * self.longest  # bytes
            if len(text.encode()) > most and (size := len(unicodedata.normalize("NFC", text).encode())) > most:
                which = which_of(prompts, i)
                raise no_room(f"{which}the prompt has {cdiv(size, self.longest)} tokens or more", self._max_model_len)


def longest_token(tokenizer: Tokenizer) -> int | None:
    """The longest token in bytes. None: a token may stand for more of a text (or its NFC form) than its own bytes."""
    if isinstance(tokenizer, ByteTokenizer):
        return 1
    from transformers import PreTrainedTokenizerFast

    its = tokenizer.hf_tokenizer
    if type(its) is not PreTrainedTokenizerFast:  # subclasses may do more to a text
        return None
    fast = its.backend_tokenizer
    added = fast.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):  # they absorb white space
        return None
    if any(part["type"] != "NFC" for part in _parts(fast.normalizer, "normalizers")):
        return None
    cuts = _parts(fast.pre_tokenizer, "pretokenizers")
    if not any(part["type"] == "ByteLevel" for part in cuts) or any(part.get("behavior") == "Removed" for part in cuts):
        return None
    if not all(part["type"] in ("ByteLevel", "Digits", "Split") for part in cuts):
        return None
    from tokenizers import models, pre_tokenizers

    vocab = fast.get_vocab()
    if type(fast.model) is not models.BPE or not vocab.keys() >= set(pre_tokenizers.ByteLevel.alphabet()):
        return None  # what is in no vocabulary is left out, or one token
    as_read = {token.content for token in added}
    return max(len(token.encode()) if token in as_read else len(token) for token in vocab)


def _parts(component: Any, name: str) -> list[dict[str, Any]]:
    """The parts of a tokenizer's component, as in tokenizer.json."""
    if component is None:
        return []
    found = json.loads(component.__getstate__())
    return list(found[name]) if found["type"] == "Sequence" else [found]
