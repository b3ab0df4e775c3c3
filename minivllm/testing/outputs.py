"""What two ways to compute the same model say, compared: they may round otherwise."""

from __future__ import annotations

from minivllm.core.outputs import CompletionOutput

NEAR = 0.26  # between log-probabilities: two steps of a bfloat16 logit near 16


def common_tokens(ours: CompletionOutput, theirs: CompletionOutput) -> int:
    """How many tokens both begin with, asserting that each is nearly as likely in both. Behind the first that differs,
    which another was nearly as likely as, nothing is compared. Both need ``logprobs`` and as many tokens."""
    assert ours.logprobs is not None and theirs.logprobs is not None
    same = 0
    for i, (x, y) in enumerate(zip(ours.token_ids, theirs.token_ids, strict=True)):
        if x != y:
            break
        assert abs(ours.logprobs[i][x].logprob - theirs.logprobs[i][x].logprob) < NEAR
        same += 1
    return same
