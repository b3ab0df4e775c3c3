"""Text of so many tokens: what a tokenizer makes of it is what was drawn."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from minivllm.bench.texts import Coder, Texts, local_coder
from minivllm.errors import MinivllmError
from minivllm.models.checkpoint import DEMO
from minivllm.models.tokenizer import ByteTokenizer


def sentencepiece_like() -> Coder:
    """As Llama 2's: a space before every text, byte tokens for what has none, and a text that begins without."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    words = [a + b for a in "bcdfg" for b in "aeiou"]
    alphabet = "\u2581" + "".join(sorted(set("".join(words))))
    vocab = {token: i for i, token in enumerate([f"<0x{byte:02X}>" for byte in range(256)] + list(alphabet))}
    merges = []
    for word in words:
        for pair in (("\u2581", word[0]), ("\u2581" + word[0], word[1])):
            vocab.setdefault("".join(pair), len(vocab))
            merges.append(pair)
    inner = Tokenizer(models.BPE(vocab, list(dict.fromkeys(merges)), byte_fallback=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    inner.decoder = decoders.Sequence(parts)
    return Coder(lambda text: inner.encode(text).ids, lambda ids: inner.decode(list(ids)))


def bytewise(vocab_size: int) -> Coder:
    bytes_ = ByteTokenizer(vocab_size)
    return Coder(bytes_.encode, bytes_.decode)


@pytest.mark.parametrize(
    ("coder", "vocab_size", "least"),
    [(local_coder(str(DEMO))[0], 3072, 1500), (bytewise(151_936), 10_001, 52), (sentencepiece_like(), 320, 20)],
    ids=["byte-level", "bytes", "sentencepiece"],
)
def test_the_text_of_so_many_words_is_as_many_tokens(coder, vocab_size, least):
    texts = Texts(coder, vocab_size)
    assert len(texts.words) >= least
    draw = random.Random(0)
    for length in (1, 7, 300):
        ids = draw.choices(list(texts.words), k=length)
        assert coder.encode(texts.of(ids))[-length:] == ids
        assert len(coder.encode(texts.of(ids))) - length in (0, 1)  # a space of its own before a text


def test_tokens_that_are_no_words_are_the_tokenizers_to_decode():
    coder, _ = local_coder(str(DEMO))
    texts, said = Texts(coder, 3072), "Once upon a time, it said: \u00bfqu\u00e9?"
    assert texts.of(texts.encode(said)) == said


def test_a_tokenizer_without_words_is_told():
    said = r"has 0 of them below 60, and 16 are needed; raise workload.max_token_id"
    with pytest.raises(MinivllmError, match=said):
        Texts(bytewise(256), 60)


def test_what_is_no_tokenizer_is_told(tmp_path: Path):
    with pytest.raises(
        MinivllmError, match=r"model.tokenizer=.* is no tokenizer that can be read .*; type a folder, or"
    ):
        local_coder(str(tmp_path))
