"""Echoed prompts at the start of completions: the text, and the tokens' log-probabilities."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from minivllm.core.outputs import CompletionOutput
from minivllm.core.sequence import FinishReason

if TYPE_CHECKING:
    from minivllm.core.outputs import Logprob, RequestOutput
    from minivllm.models.tokenizer import Tokenizer
    from minivllm.serve.protocol import CompletionBody


@dataclass(frozen=True, slots=True)
class Echo:
    """``texts`` and ``first_tokens`` by prompt; ``logprobs`` as in the request. ``only``: return the prompt alone,
    whatever was generated."""

    texts: Sequence[str]
    first_tokens: Sequence[str]
    logprobs: int | None
    only: bool

    @classmethod
    def of(cls, body: CompletionBody, prompts: Iterable[Mapping[str, Any]], tokenizer: Tokenizer) -> Echo:
        """Text prompts are echoed as they are, token ids as decoded text."""
        decode, skip = tokenizer.decode, body.skip_special_tokens is not False
        texts, first_tokens = [], []
        for prompt in prompts:
            ids, text = prompt["prompt_token_ids"], prompt.get("prompt")
            texts.append(decode(ids, skip_special_tokens=skip) if text is None else text)
            first_tokens.append(decode(ids[:1], skip_special_tokens=False))
        return cls(texts, first_tokens, body.logprobs, body.only_echo)

    def first(self, prompt: int, output: RequestOutput) -> RequestOutput:
        """A request's first output, with its echo in front. The first token's log-probabilities are an empty dict."""
        text = self.texts[prompt]
        before = [own_and_best(values, self.logprobs or 0) for values in output.prompt_logprobs or ()]
        outputs = [
            replace(new, text=text + new.text, logprobs=None if new.logprobs is None else before + new.logprobs)
            for new in output.outputs
        ]
        return replace(output, outputs=outputs)


def emptied(output: RequestOutput) -> RequestOutput:
    """A copy of ``output`` without tokens, with the same end."""
    outputs = [
        CompletionOutput(
            new.index,
            "",
            [],
            logprobs=None if new.logprobs is None else [],
            finish_reason=None if new.finish_reason is None else FinishReason.LENGTH.value,
        )
        for new in output.outputs
    ]
    return replace(output, outputs=outputs)


def own_and_best(values: dict[int, Logprob] | None, most: int) -> dict[int, Logprob]:
    """At a prompt position, its own token first, and the ``most`` best tokens; nothing at the first position."""
    return {key: one for i, (key, one) in enumerate((values or {}).items()) if not i or (one.rank or 0) <= most}
