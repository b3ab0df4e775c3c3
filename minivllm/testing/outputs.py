"""Compares the outputs of two ways to compute the same model, which may round differently."""

from __future__ import annotations

from minivllm.core.outputs import CompletionOutput

NEAR = 0.26  # difference of log-probabilities: two bfloat16 steps of a logit near 16


def common_tokens(ours: CompletionOutput, theirs: CompletionOutput) -> int:
    """The number of leading tokens that both share, asserting that each has nearly the same log-probability in both.
    Nothing is compared from the first difference on. Both need ``logprobs`` and the same number of tokens."""
    assert ours.logprobs is not None and theirs.logprobs is not None
    same = 0
    for i, (x, y) in enumerate(zip(ours.token_ids, theirs.token_ids, strict=True)):
        if x != y:
            break
        assert abs(ours.logprobs[i][x].logprob - theirs.logprobs[i][x].logprob) < NEAR
        same += 1
    return same
