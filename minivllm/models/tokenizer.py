"""Text to token ids and back: a checkpoint's tokenizer, or bytes if there is none. Does not need torch."""

from __future__ import annotations

import inspect
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from os.path import expanduser
from pathlib import Path
from typing import Any

from minivllm.config.engine_config import ModelOptions
from minivllm.core.model_config import ModelConfig
from minivllm.errors import CheckpointError, RequestError, lone_surrogate, one_line, shown
from minivllm.models.checkpoint import DEMO, download
from minivllm.models.conversation import Message, for_template, takes_parts, takes_text_arguments
from minivllm.models.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer


class Tokenizer(ABC):
    """What the engine and the server need from a tokenizer."""

    vocab_size: int  # all ids are below it
    eos_token_ids: tuple[int, ...]

    @property
    def eos_token_id(self) -> int | None:
        return self.eos_token_ids[0] if self.eos_token_ids else None

    @property
    def chat_template(self) -> str | None:
        """The Jinja chat template, if there is one."""
        return None

    @property
    def hf_tokenizer(self) -> Any:
        """The underlying transformers tokenizer, if there is one; else this object."""
        return self

    @abstractmethod
    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Each text's token ids. Raises RequestError if a text contains a lone surrogate."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """``encode_batch`` for one text."""
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    @abstractmethod
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    @abstractmethod
    def render_chat(
        self,
        messages: Iterable[Message],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """A conversation as text, special tokens written out, for ``encode(…, add_special_tokens=False)``.

        ``tools``: in OpenAI's format, for the template; ``chat_template`` replaces the checkpoint's; with
        ``continue_final_message`` the text ends with that of the last message; ``variables`` go to the template. Raises
        RequestError if there is no template, or if it rejects the conversation."""

    def apply_chat_template(self, messages: Iterable[Message], /, **options: Any) -> list[int]:
        """A conversation as token ids: the encoded output of ``render_chat``, with the same options."""
        return self.encode(self.render_chat(messages, **options), add_special_tokens=False)

    @abstractmethod
    def detokenizer(self, prompt_ids: Sequence[int] = (), *, skip_special_tokens: bool = True) -> Detokenizer:
        """A detokenizer for one sequence, whose text continues ``prompt_ids``."""

    def for_grammars(self, vocab_size: int, ends: Collection[int]) -> Any:
        """This tokenizer as an ``llguidance.LLTokenizer``, for grammars: ids below ``vocab_size`` and perhaps one more.
        ``ends``: end-of-sequence ids; if empty, another id takes that role. Raises RequestError if that fails."""
        raise RequestError(f"structured_outputs is not supported with a {type(self).__name__}; leave it out")


def check_variables(variables: Mapping[str, Any], tokenizer: Tokenizer) -> Mapping[str, Any]:
    """A user's variables for a chat template. Raises RequestError for a name that is an argument of the rendering
    function itself."""
    if not variables:
        return variables
    if not isinstance(variables, Mapping) or any(not isinstance(name, str) for name in variables):
        raise RequestError(f"chat_template_kwargs: {shown(variables)} is not a mapping of names")
    arguments = inspect.signature(tokenizer.hf_tokenizer.apply_chat_template).parameters
    if taken := variables.keys() & {*arguments, "messages"}:
        raise RequestError(
            f"chat_template_kwargs: {', '.join(sorted(taken))} cannot be set there; only a template's variables can"
        )
    return variables


class CheckpointTokenizer(Tokenizer):
    """The tokenizer of a checkpoint folder, through transformers."""

    def __init__(self, path: Path, model_config: ModelConfig | None = None) -> None:
        try:
            self._inner = _load(path)
        except Exception as error:  # whatever transformers or the parser raises for a broken file
            why = "it has no tokenizer.json: fetch it, or type model.tokenizer=DIR of another folder that has one"
            if (path / "tokenizer.json").is_file():
                said = f"{type(error).__name__}: {one_line(error)}"
                why = f"its tokenizer.json is damaged, or of a newer kind ({said}); fetch it again"
            raise CheckpointError(f"the tokenizer in {path} cannot be read: {why}") from error
        self.path = path
        self.vocab_size = len(self._inner)
        config_ids = model_config.eos_token_ids if model_config is not None else ()
        own = self._inner.eos_token_id
        self.eos_token_ids = tuple(dict.fromkeys((*(() if own is None else (own,)), *config_ids)))
        fast = getattr(self._inner, "backend_tokenizer", None)
        bytewise = fast is not None and _is_byte_level(fast)
        # by skip_special_tokens: each token's bytes
        self._bytes = {skip: _TokenBytes(fast, skip) for skip in (True, False)} if bytewise else None
        self._encoder = fast if _is_plain(self._inner) else None
        self._takes: dict[str, dict[str, bool]] = {}  # by chat template, what ``for_template`` must know

    @property
    def chat_template(self) -> str | None:
        return str(self._inner.chat_template) if self._inner.chat_template else None

    @property
    def hf_tokenizer(self) -> Any:
        return self._inner

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        _check_unicode(texts)
        if self._encoder is None:
            return [self._inner.encode(text, add_special_tokens=add_special_tokens, verbose=False) for text in texts]
        # Bypasses transformers, which makes masks, offsets and types for every token while holding the GIL.
        self._encoder.no_truncation()
        self._encoder.no_padding()
        self._encoder.encode_special_tokens = self._inner.split_special_tokens
        encodings = self._encoder.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)  # on all cores
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._inner.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def detokenizer(self, prompt_ids: Sequence[int] = (), *, skip_special_tokens: bool = True) -> Detokenizer:
        if self._bytes is not None:
            return ByteDetokenizer(self._bytes[skip_special_tokens], prompt_ids)
        return WindowDetokenizer(partial(self.decode, skip_special_tokens=skip_special_tokens), prompt_ids)

    def render_chat(self, messages: Iterable[Message], /, *, chat_template: str | None = None, **options: Any) -> str:
        from jinja2 import TemplateError, TemplateSyntaxError

        if chat_template is None and self.chat_template is None:
            raise RequestError(
                f"the checkpoint {self.path} has no chat template; use generate with the whole prompt as text, "
                "give chat_template=, or put a chat_template.jinja into its folder"
            )
        if not isinstance(chat_template, str | None):
            raise RequestError(f"chat_template={shown(chat_template)} is not text, as Jinja is")
        render = partial(self._inner.apply_chat_template, tokenize=False, chat_template=chat_template)
        template = chat_template or self.chat_template or ""
        if template not in self._takes:
            takes = {"parts": takes_parts(render), "text_arguments": takes_text_arguments(render)}
            self._takes[template] = takes
        if options.get("tools") and "tools" not in template:
            raise RequestError("tools: the chat template does not support tools; leave them out")
        conversation = [for_template(message, **self._takes[template]) for message in messages]
        options.setdefault("add_generation_prompt", True)
        try:
            return render(conversation, **options)
        except TemplateSyntaxError as error:
            where = "chat_template" if chat_template else f"the chat template of {self.path}"
            raise RequestError(f"{where}: line {error.lineno} is not valid Jinja: {error.message}") from error
        except Exception as error:  # any error from a template, raised on purpose or not
            why = str(error)
            if not isinstance(error, TemplateError | TypeError | ValueError):  # others need their class name
                why = f"{type(error).__name__}: {error}".removesuffix(": ")
            raise RequestError(f"messages: the chat template refuses this: {why}") from error

    def for_grammars(self, vocab_size: int, ends: Collection[int]) -> Any:
        from llguidance import LLTokenizer

        fast = getattr(self._inner, "backend_tokenizer", None)
        if fast is None:
            return super().for_grammars(vocab_size, ends)
        size, whole = 1 + max(fast.get_vocab().values()), fast.to_str()
        ends = sorted(end for end in ends if end < size)
        if not ends:
            whole = json.loads(whole)
            its = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            whole["added_tokens"].append({"id": size, "content": "<|end of grammar|>", "special": True} | its)
            size, ends, whole = size + 1, [size], json.dumps(whole)
        try:
            return LLTokenizer(whole, n_vocab=max(vocab_size, size), eos_token=ends)
        except ValueError as error:
            raise RequestError(f"structured_outputs is not supported with this tokenizer: {error}") from error


def _check_unicode(texts: Sequence[str]) -> None:
    for text in texts:
        if (half := lone_surrogate(text)) is not None:
            raise RequestError(
                f"the prompt contains {half}: invalid UTF-8, or text that was cut; decode it with errors='replace'"
            )


def _is_plain(tokenizer: Any) -> bool:
    """Whether the backend does all of the encoding: subclasses may do more to a text."""
    from transformers import PreTrainedTokenizerFast

    return type(tokenizer) is PreTrainedTokenizerFast


def _is_byte_level(fast: Any) -> bool:
    """Whether decoding joins the tokens' bytes and does nothing else."""
    if fast.decoder is None:
        return False
    decoder = json.loads(fast.decoder.__getstate__())  # the decoder's part of tokenizer.json
    parts = decoder.get("decoders", [decoder])
    return bool(parts) and all(part.get("type") == "ByteLevel" for part in parts)


class _TokenBytes(dict[int, bytes]):
    """A byte-level tokenizer's token id -> its bytes, filled lazily."""

    def __init__(self, fast: Any, skip_special_tokens: bool) -> None:
        super().__init__()
        self._fast = fast
        self._skipped = {
            i for i, token in fast.get_added_tokens_decoder().items() if token.special and skip_special_tokens
        }

    def __missing__(self, token_id: int) -> bytes:
        token: str = "" if token_id in self._skipped else self._fast.id_to_token(token_id) or ""
        try:
            value = bytes([_BYTE_OF[character] for character in token])
        except KeyError:  # an added token: plain text
            value = token.encode()
        self[token_id] = value
        return value


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable character: itself, or the next one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


class _Bytes(dict[int, bytes]):
    """Token id -> one byte; empty for special tokens."""

    def __init__(self, special: Iterable[int]) -> None:
        super().__init__(dict.fromkeys(special, b""))

    def __missing__(self, token_id: int) -> bytes:
        return bytes((token_id % 256,))


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as ids, for dummy weights (``load_format=dummy`` without a checkpoint)."""

    def __init__(self, vocab_size: int, eos_token_ids: tuple[int, ...] = ()) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        _check_unicode(texts)
        return [[byte % self.vocab_size for byte in text.encode()] for text in texts]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.detokenizer(skip_special_tokens=skip_special_tokens).finish(ids)

    def detokenizer(self, prompt_ids: Sequence[int] = (), *, skip_special_tokens: bool = True) -> Detokenizer:
        special = self.eos_token_ids if skip_special_tokens else ()
        return ByteDetokenizer(_Bytes(special), prompt_ids)

    def render_chat(
        self,
        messages: Iterable[Message],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        if chat_template is not None:
            raise RequestError("chat_template needs a checkpoint's tokenizer; leave it out")
        told = [] if not tools else [{"role": "tools", "content": json.dumps(tools)}]
        lines = [
            f"{message['role']}: {for_template(message, parts=False)['content']}\n" for message in (*told, *messages)
        ]
        text = "".join(lines)
        if continue_final_message:
            return text.removesuffix("\n")
        return text + ("assistant: " if add_generation_prompt else "")

    def for_grammars(self, vocab_size: int, ends: Collection[int]) -> Any:
        from llguidance import LLTokenizer, TokenizerWrapper

        size = max(vocab_size, 256)
        known = _BytesForGrammars(size + (not ends), sorted(ends) or [size])
        return LLTokenizer(TokenizerWrapper(known), eos_token=known.special_token_ids)


class _BytesForGrammars:
    """The tokenizer interface that llguidance expects: ids below 256 are bytes, others are empty."""

    bos_token_id = None

    def __init__(self, vocab_size: int, ends: Sequence[int]) -> None:
        self.eos_token_id, self.special_token_ids = ends[0], list(ends)
        ids = range(vocab_size)
        self.tokens = [bytes((token,)) if token < 256 and token not in ends else b"" for token in ids]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def load_tokenizer(
    options: ModelOptions, path: Path | None, model_config: ModelConfig, load_format: str = "auto"
) -> Tokenizer:
    """``model.tokenizer`` (a folder or a repository) if given, else the checkpoint's own; bytes for dummy weights if
    neither is on this machine."""
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


def tokenizer_folder(name: str) -> Path:
    """The folder of ``model.tokenizer``: a folder, a repository to download, or demo. Raises CheckpointError."""
    folder = Path(expanduser(name))
    if folder.is_dir():
        return folder
    if name == "demo" and DEMO.is_dir():
        return DEMO
    if folder.exists():
        there = f"model.tokenizer={folder.parent}"
        raise CheckpointError(f"model.tokenizer={name} is a file; pass the folder that holds it ({there})")
    if not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name):  # some old repositories have no ORG/
        raise CheckpointError(
            f"model.tokenizer={name} does not exist; pass a folder that holds {_FILES[0]}, or ORG/NAME"
        )
    return download(name, key="model.tokenizer")


_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def _find(options: ModelOptions, path: Path | None, *, offline: bool) -> Path | None:
    if options.tokenizer is not None:
        return tokenizer_folder(options.tokenizer)
    if path is not None:
        return path
    if options.path is not None:
        return Path(expanduser(options.path))
    if options.repo is None:
        return DEMO if options.name == "demo" and DEMO.is_dir() else None
    try:
        return download(options.repo, options.revision, offline=offline)
    except CheckpointError:
        if offline:
            return None
        raise


def _load(path: Path) -> Any:
    """tokenizer.json is complete and needs only the light class; older formats go through AutoTokenizer, which knows
    every kind but imports more (1.3 s instead of 0.7 s)."""
    if (path / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(path)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)
