"""Requests as callers see them: one prompt, n completions, their text, and when they end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from minivllm.core.outputs import CompletionOutput, Logprob, RequestOutput
from minivllm.core.sampling_params import RequestOutputKind, SamplingParams
from minivllm.core.sequence import FinishReason, Sequence

if TYPE_CHECKING:
    from minivllm.core.adapter_places import LoadedAdapter

COMPLETION = "\0"  # in a sequence's id, between its request's id and the completion's index if there are several
PROMPT_TOKENS = 16  # given to a detokenizer: the first output token's text may depend on what precedes it


class TextPrompt(TypedDict):
    """A text prompt in vLLM's format."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt of token ids in vLLM's format, optionally with its text."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


Prompt = str | list[int] | dict[str, Any] | TextPrompt | TokensPrompt


class TokenTexts(dict[int, str]):
    """The text of each single token, decoded on first use."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token: int) -> str:
        text = self[token] = self._tokenizer.decode([token], skip_special_tokens=False)
        return text


class Completion:
    """One of a request's completions: its tokens as text, stop strings, log-probabilities."""

    def __init__(self, index: int, seq: Sequence, tokenizer: Any, texts: TokenTexts) -> None:
        params = seq.params
        self.index, self.seq = index, seq
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.logprobs: list[dict[int, Logprob]] | None = [] if params.logprobs is not None else None
        self.cumulative_logprob: float | None = 0.0 if params.logprobs is not None else None
        self._tokenizer = tokenizer if params.detokenize else None
        self.texts = texts if params.detokenize else None
        ends = () if params.ignore_eos else tokenizer.eos_token_ids or ()
        self._eos = next(iter(ends), None)  # the tokenizer's own, which gives no ``stop_reason``
        self._pieces = (
            tokenizer.detokenizer(seq.known[-PROMPT_TOKENS:].tolist(), skip_special_tokens=params.skip_special_tokens)
            if params.detokenize
            else None
        )
        self._stop: list[str] = list(params.stop or [])
        # tokens whose own text is not in the output, as in vLLM
        self._hidden = frozenset() if params.include_stop_str_in_output else frozenset(seq.stop_ids)
        # text that might be the start of a stop string is held back until it is known not to be
        self._hold = 0 if params.include_stop_str_in_output else max((len(s) for s in self._stop), default=1) - 1
        self._read_tokens = self._said_text = self._said_tokens = 0

    def add(self, token: int) -> bool:
        """Add a new token; returns whether a stop string ended the completion."""
        self.token_ids.append(token)
        if self._pieces is None or not self._stop:
            return False  # it is decoded when the text is needed
        may_end = len(self.token_ids) > self.seq.params.min_tokens
        if may_end and token in self._hidden:
            return False  # it ended the completion
        before = len(self.text)
        self._read()
        return may_end and self._cut(before)

    def _read(self, end: int | None = None) -> None:
        """Decode the tokens added since the last call, up to ``end`` (None: all)."""
        end = len(self.token_ids) if end is None else end
        if self._pieces is not None and self._read_tokens < end:
            self.text += self._pieces.add(self.token_ids[self._read_tokens : end])
            self._read_tokens = end

    def end(self, reason: FinishReason) -> None:
        """End the completion; its last token has been added."""
        if self.finish_reason is not None:
            return  # a stop string came first
        self.finish_reason = reason
        stopped_by = self.token_ids[-1] if reason is FinishReason.STOP else None
        if self._pieces is not None:
            self._read(len(self.token_ids) - (stopped_by in self._hidden))
            before = len(self.text)
            self.text += self._pieces.finish()
            if self._stop and len(self.token_ids) > self.seq.params.min_tokens and self._cut(before):
                return
        self.stop_reason = None if stopped_by == self._eos else stopped_by

    def _cut(self, before: int) -> bool:
        """Look for stop strings that end in the text after ``before``; cut the text at the one that ends first."""
        found = [(at, stop) for stop in self._stop if (at := self.text.find(stop, max(before - len(stop) + 1, 0))) >= 0]
        if not found:
            return False
        at, stop = min(found, key=lambda one: one[0] + len(one[1]))  # if tied, the one given first
        self.text = self.text[: at + len(stop) if self.seq.params.include_stop_str_in_output else at]
        self.stop_reason = stop
        self.finish_reason = FinishReason.STOP
        return True

    def add_logprobs(self, token: int, value: float, rank: int, top_ids: list[int], top: list[float]) -> None:
        """Add those of the new token, which comes first, and of the top tokens, at least as many as requested."""
        assert self.logprobs is not None and self.cumulative_logprob is not None
        self.logprobs.append(_entry(self.texts, self.seq.params.logprobs or 0, token, value, rank, top_ids, top))
        self.cumulative_logprob += value

    def output(self, kind: RequestOutputKind) -> CompletionOutput:
        reason = self.finish_reason
        if reason is None:
            self._read()
        shown, tokens = len(self.text), len(self.token_ids)
        if self._hold and reason is None:
            shown = max(shown - self._hold, self._said_text)
        first_text, first_token = (self._said_text, self._said_tokens) if kind is RequestOutputKind.DELTA else (0, 0)
        self._said_text, self._said_tokens = shown, tokens
        return CompletionOutput(  # positional arguments are faster, and there may be thousands a second
            self.index,
            self.text[first_text:shown],
            self.token_ids[first_token:],
            self.cumulative_logprob,
            None if self.logprobs is None else self.logprobs[first_token:tokens],
            None if reason is None else reason.value,
            self.stop_reason,
        )


class Request:
    """A prompt with its ``n`` completions."""

    def __init__(
        self, request_id: str, prompt: str | None, prompt_token_ids: list[int], params: SamplingParams
    ) -> None:
        self.request_id, self.prompt, self.prompt_token_ids, self.params = request_id, prompt, prompt_token_ids, params
        self.completions: list[Completion] = []
        self.adapter: LoadedAdapter | None = None
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = (
            None if params.prompt_logprobs is None else [None]
        )
        self.had_output = False

    def give_adapter(self, adapter: LoadedAdapter) -> None:
        """All its completions have this LoRA adapter; none is under way."""
        self.adapter = adapter
        for completion in self.completions:
            completion.seq.adapter = adapter

    @property
    def finished(self) -> bool:
        return None not in [completion.finish_reason for completion in self.completions]

    @property
    def needs_tokens(self) -> bool:
        """Whether tokens must be read at each step, not only at the end."""
        p = self.params
        streams = p.output_kind is not RequestOutputKind.FINAL_ONLY
        return streams or bool(p.stop) or p.logprobs is not None or p.guided

    def add_prompt_logprobs(self, place: int, values: list[tuple[float, int, list[int], list[float]]]) -> None:
        """Add those of the prompt's tokens from ``place`` on; ones that were added before are skipped."""
        assert self.prompt_logprobs is not None
        count, texts = self.params.prompt_logprobs or 0, self.completions[0].texts
        for at, found in enumerate(values, place):
            if at == len(self.prompt_logprobs):
                self.prompt_logprobs.append(_entry(texts, count, self.prompt_token_ids[at], *found))

    @property
    def scored(self) -> bool:
        """Whether all requested prompt log-probabilities are there."""
        return self.prompt_logprobs is None or len(self.prompt_logprobs) == len(self.prompt_token_ids)

    def output(self) -> RequestOutput:
        kind = self.params.output_kind
        scores = None if self.had_output and kind is RequestOutputKind.DELTA else self.prompt_logprobs
        self.had_output = True
        outputs = [completion.output(kind) for completion in self.completions]
        cached = self.completions[0].seq.num_cached_tokens  # later ones hit what the first has computed
        adapter = self.adapter
        return RequestOutput(
            self.request_id, self.prompt, self.prompt_token_ids, outputs, self.finished, cached, scores,
            None if adapter is None else adapter.request,
        )  # fmt: skip


def _entry(
    texts: TokenTexts | None, count: int, token: int, value: float, rank: int, top_ids: list[int], top: list[float]
) -> dict[int, Logprob]:
    """The token's log-probability and those of the top ``count``."""
    entry = {token: Logprob(value, rank, None if texts is None else texts[token])}
    for i, other in enumerate(top_ids[:count]):
        entry[other] = Logprob(top[i], i + 1, None if texts is None else texts[other])
    return entry
