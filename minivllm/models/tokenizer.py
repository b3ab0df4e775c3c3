"""Text to token ids and back: a checkpoint's tokenizer, bytes where there is none, and text as it grows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from minivllm.config.engine_config import ModelOptions
from minivllm.core.model_config import ModelConfig
from minivllm.errors import CheckpointError, RequestError
from minivllm.models.checkpoint import download

Message = Mapping[str, Any]  # "role" and "content"


class Tokenizer(ABC):
    """What the engine and the server ask of a tokenizer."""

    vocab_size: int  # ids are below it
    eos_token_ids: tuple[int, ...]

    @property
    def eos_token_id(self) -> int | None:
        return self.eos_token_ids[0] if self.eos_token_ids else None

    @property
    def has_chat_template(self) -> bool:
        return True

    @abstractmethod
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    @abstractmethod
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    @abstractmethod
    def apply_chat_template(
        self, messages: Iterable[Message], *, add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """A conversation as token ids; ``variables`` go to the template. Raises RequestError if there is none."""

    def detokenizer(self, prompt_ids: Sequence[int] = (), *, skip_special_tokens: bool = True) -> Detokenizer:
        return Detokenizer(self, prompt_ids, skip_special_tokens=skip_special_tokens)


class CheckpointTokenizer(Tokenizer):
    """The tokenizer of a checkpoint folder, through transformers."""

    def __init__(self, path: Path, model_config: ModelConfig | None = None) -> None:
        try:
            self._inner = _load(path)
        except Exception as error:  # whatever transformers, or the format's own parser, makes of a broken file
            raise CheckpointError(f"the tokenizer in {path} cannot be read: {error}") from error
        self.path = path
        self.vocab_size = len(self._inner)
        config_ids = model_config.eos_token_ids if model_config is not None else ()
        own = self._inner.eos_token_id
        self.eos_token_ids = tuple(dict.fromkeys((*config_ids, *(() if own is None else (own,)))))

    @property
    def has_chat_template(self) -> bool:
        return bool(self._inner.chat_template)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._inner.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._inner.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def apply_chat_template(
        self, messages: Iterable[Message], *, add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        if not self.has_chat_template:
            raise RequestError(
                f"the checkpoint {self.path} has no chat template; use generate with the whole prompt as text, "
                "or put a chat_template.jinja into its folder"
            )
        return self._inner.apply_chat_template(
            [dict(message) for message in messages],
            add_generation_prompt=add_generation_prompt,
            tokenize=True,
            return_dict=False,
            **variables,
        )


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as ids, for weights that mean nothing anyway (``load_format=dummy`` without a checkpoint)."""

    def __init__(self, vocab_size: int, eos_token_ids: tuple[int, ...] = ()) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [byte % self.vocab_size for byte in text.encode()]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(i % 256 for i in ids if not (skip_special_tokens and i in self.eos_token_ids)).decode(
            errors="replace"
        )

    def apply_chat_template(
        self, messages: Iterable[Message], *, add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return self.encode("".join(lines) + ("assistant: " if add_generation_prompt else ""))


class Detokenizer:
    """One sequence's text as its tokens come: only what later tokens cannot change is given out.

    Two offsets into the ids: text up to ``_read`` is out; decoding starts at ``_prefix``, a little before, so that
    tokens see the neighbour on which their spacing depends. The window stays a few tokens long, whatever the length.
    """

    WINDOW = 32  # tokens that may wait for the end of a character, which has at most 4 bytes
    CONTEXT = 6  # prompt tokens that the first output token sees

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids = list(prompt_ids[-self.CONTEXT :])  # what lies before _prefix is dropped as it is passed
        self._read = len(self._ids)

    def add(self, ids: Iterable[int]) -> str:
        """Take in new tokens; returns the text that became certain."""
        out = []
        for token in ids:
            self._ids.append(token)
            out.append(self._emit(final=False))
        return "".join(out)

    def finish(self) -> str:
        """The rest: a character that was never completed comes out as U+FFFD."""
        return self._emit(final=True)

    def _emit(self, final: bool) -> str:
        if self._read == len(self._ids):
            return ""
        before = self._tokenizer.decode(self._ids[: self._read], skip_special_tokens=self._skip)
        text = self._tokenizer.decode(self._ids, skip_special_tokens=self._skip)
        full = final or len(self._ids) - self._read >= self.WINDOW
        if not full and (len(text) <= len(before) or text.endswith("\ufffd")):
            return ""
        del self._ids[: self._read]
        self._read = len(self._ids)
        return text[len(before) :]


def load_tokenizer(
    options: ModelOptions, path: Path | None, model_config: ModelConfig, load_format: str = "auto"
) -> Tokenizer:
    """``model.tokenizer`` (a folder or a repository) if given, else the checkpoint's own; with dummy weights and
    nothing on this machine, bytes."""
    dummy = load_format == "dummy"
    folder = _find(options, path, offline=dummy)
    if folder is not None and any((folder / name).is_file() for name in _FILES):
        return CheckpointTokenizer(folder, model_config)
    if dummy:
        return ByteTokenizer(model_config.vocab_size, model_config.eos_token_ids)
    raise CheckpointError(
        f"{folder or options.name} has no tokenizer ({', '.join(_FILES)}); add its files, "
        "or set model.tokenizer to a folder or repository that has them"
    )


_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def _find(options: ModelOptions, path: Path | None, *, offline: bool) -> Path | None:
    if options.tokenizer is not None:
        folder = Path(options.tokenizer).expanduser()
        return folder if folder.is_dir() else download(options.tokenizer)
    if path is not None:
        return path
    if options.path is not None:
        return Path(options.path).expanduser()
    if options.repo is None:
        return None
    try:
        return download(options.repo, options.revision, offline=offline)
    except CheckpointError:
        if offline:
            return None
        raise


def _load(path: Path) -> Any:
    """tokenizer.json is complete and needs the light class; anything older goes through AutoTokenizer, which knows
    every kind (and imports much: 1.3 s against 0.7 s)."""
    if (path / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(path)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)
