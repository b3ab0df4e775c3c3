"""Prompts as text, for servers that do not accept tokens: made of words that are one token each, so that N words are N
tokens. Random tokens would not do: their text is tokenized differently, mostly into more tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from minivllm.errors import CheckpointError, MinivllmError

_FEWEST = 16  # words; with fewer, prompts would begin alike too often
_WORDS = re.compile(r"^ [A-Za-z]+$", re.MULTILINE)
_LETTERS = re.compile(r"^[A-Za-z]$", re.MULTILINE)  # for vocabularies of bytes, without words


@dataclass(frozen=True, slots=True)
class Coder:
    """A tokenizer, local or remote: text to tokens without adding special ones, and back, including special ones."""

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]


class Texts:
    """Text for token ids.

    Args:
        vocab_size: only ids below it are considered.

    Raises:
        MinivllmError: there are too few words.
    """

    def __init__(self, coder: Coder, vocab_size: int) -> None:
        self._coder = coder
        self._line_end = coder.encode("\n")[-1:]
        lines = self._one_a_line(range(vocab_size))
        for pattern in (_WORDS, _LETTERS):
            words = self._that_stay(dict.fromkeys(pattern.findall(lines)))
            if len(words) >= _FEWEST:
                break
        else:
            raise MinivllmError(
                f"endpoint=chat makes text of tokens that are a word each: the tokenizer has {len(words)} of them "
                f"below {vocab_size}, and {_FEWEST} are needed; raise workload.max_token_id if it has more tokens, or "
                "type endpoint=completions"
            )
        self.words = words  # token id -> its text

    def of(self, ids: Sequence[int]) -> str:
        """A prompt's text. Known words are joined here; otherwise (ids from a trace) the tokenizer decodes all."""
        known = [self.words.get(token) for token in ids]
        return self._coder.decode(ids) if None in known else "".join(word for word in known if word is not None)

    def encode(self, text: str) -> list[int]:
        return self._coder.encode(text)

    def _one_a_line(self, ids: Iterable[int]) -> str:
        """Each token's text when decoded alone, one per line: in one call, as it may be a request to a server."""
        return self._coder.decode([token for one in ids for token in (one, *self._line_end)])

    def _that_stay(self, words: Iterable[str]) -> dict[int, str]:
        """The words that are still one token among others."""
        wanted = set(words)
        if not wanted:
            return {}
        ids = self._coder.encode("".join(words))
        return {
            token: word for token, word in zip(ids, self._one_a_line(ids).split("\n"), strict=False) if word in wanted
        }


def local_coder(name: str) -> tuple[Coder, int]:
    """The tokenizer in a folder or repository, and the size of its vocabulary.

    Raises:
        MinivllmError: there is none.
    """
    from minivllm.models.tokenizer import CheckpointTokenizer, tokenizer_folder

    try:
        tokenizer = CheckpointTokenizer(tokenizer_folder(name))
    except CheckpointError as error:
        raise MinivllmError(
            f"model.tokenizer={name} is no tokenizer that can be read ({error}); type a folder, or a repository that "
            "can be reached, as model.tokenizer=Qwen/Qwen3-0.6B"
        ) from error
    coder = Coder(
        partial(tokenizer.encode, add_special_tokens=False), partial(tokenizer.decode, skip_special_tokens=False)
    )
    return coder, tokenizer.vocab_size
