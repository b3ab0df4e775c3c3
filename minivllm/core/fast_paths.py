"""What an attention backend may do beyond ``AttentionBackend`` so that steps are faster. All of it is optional;
docs/add-an-attention-backend.md says when each pays off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from minivllm.core.batch import NO_INTS

if TYPE_CHECKING:
    import numpy as np
    import torch

    from minivllm.core.cascade import CascadeLimits
    from minivllm.core.interfaces import AttentionLayer
    from minivllm.kernels.rms_norm import RowScale


class FastPaths:
    """Attributes and methods of ``AttentionBackend`` that say which fast paths a backend has; by default none."""

    plans_on_host: bool = False  # whether ``plan`` reads host arrays; if not, replays of decode-only steps skip it
    captures_prompts: bool = True  # False: steps with prompts cannot be captured for this spec, ``ALWAYS`` or not
    most_captured_context: int | None = None  # steps with prompts of longer contexts are faster launched one by one
    fused_decode_rows: int = 0  # decode-only steps of at most this many rows go to ``decode_qkv``; 0: none
    # Whether ``decode`` is plain causal attention to the whole context: a kernel of all layers may then replace it.
    plain_decode: bool = False
    # Whether ``decode`` and ``prefill`` may run concurrently: they share no memory that they write to.
    attends_beside: bool = False
    cascade_limits: CascadeLimits | None = None  # set if ``spec.cascade`` and it uses ``AttentionBatch.cascade``
    fresh_prompts: bool = False  # set by ``plan``: this step's prompts (``whole_prompts``) go to ``prefill_fresh``

    def prompt_words(self, query_lens: np.ndarray, seq_lens: np.ndarray, captured: int = 0) -> np.ndarray:
        """Int32 data that ``prefill`` needs on the device, computed on the host from the prompt rows' query and context
        lengths, (p,) int32 each. It is copied with the rest of the step and comes back as
        ``AttentionBatch.prompt_words``. ``captured``: the graph's prompt tokens (0: eager); the number of words may
        depend only on it and on p."""
        return NO_INTS

    def decode_qkv(
        self, qkv: torch.Tensor, q_weight: torch.Tensor | None, k_weight: torch.Tensor | None, eps: float,
        cos_sin: torch.Tensor, positions: torch.Tensor, layer: AttentionLayer, scale: RowScale | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """For decode-only steps that ``takes_qkv`` accepts: q/k-norm (weights (head_dim,) or None), rotary embedding
        (``cos_sin`` (max_position, rotary_dim) float32), cache write and attention in one call.

        qkv: (rows, (num_heads + 2 * num_kv_heads) * head_dim); its rows are to be multiplied by ``scale`` first, which
        is passed only if there is one. Returns (rows, num_heads, head_dim).
        """
        raise NotImplementedError

    def takes_qkv(self, rows: int, scaled: bool, rotary_dim: int) -> bool:
        """Whether a step of ``rows`` decodes and nothing else goes to ``decode_qkv``; ``scaled``: with a scale."""
        return rows <= self.fused_decode_rows and not scaled

    def prefill_fresh(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, out: torch.Tensor
    ) -> None:
        """Like ``prefill``, for steps where ``plan`` set ``fresh_prompts``; also gets this step's k and v.

        k, v: (tokens, num_kv_heads, head_dim), contiguous in the last dimension. They are in the cache as well.
        """
        raise NotImplementedError
