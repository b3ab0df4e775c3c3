"""From the residual stream to the attention output: QKV projection, q/k norm, rotary, cache write, backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from minivllm.core.interfaces import AttentionBackend, AttentionSpec
from minivllm.kernels.attention.rotary import Heads, qk_norm_rope, qk_norm_rope_store
from minivllm.kernels.linear.cluster_linear import Scales, cluster_qkv, use_cluster
from minivllm.kernels.linear.fp8_linear import quantize
from minivllm.kernels.linear.persistent_linear import HEAD_DIMS, persistent_qkv, use_persistent
from minivllm.kernels.linear.products import linear_into
from minivllm.kernels.rms_norm import RowScale, row_factors
from minivllm.layers.linear import LinearBase, QKVParallelLinear
from minivllm.layers.norm import RMSNorm
from minivllm.layers.parts import PartedStream
from minivllm.layers.plain import is_plain
from minivllm.layers.rotary import RotaryTable

_Path = Callable[[torch.Tensor, torch.Tensor, AttentionBackend, RowScale | None], torch.Tensor]


class Attention:
    """One layer's attention. It owns no weights (so it is not a Module); its only state is the path its backend takes.

    A backend that does not override ``AttentionBackend.forward`` or ``write`` gets the fused path: norm, rotary and
    cache write in one kernel, which leaves k and v in qkv, too, for ``fresh_prompts``. That work moves into the
    attention kernel in decode steps where ``takes_qkv`` is true, and into the projection in others where that is
    faster. A backend that overrides either is given q, k and v.

    ``scale`` multiplies the scores (default head_dim**-0.5); it must be the same in all layers of a model. Only the
    norms' weights and eps are used; eps must be the same for both.

    Raises:
        TypeError: a norm is not an RMSNorm, or overrides its ``forward``.
        ValueError: the norms have different eps.
    """

    def __init__(
        self,
        index: int,
        num_heads: int,  # per rank
        num_kv_heads: int,  # per rank
        head_dim: int,
        rotary: RotaryTable,
        *,
        scale: float | None = None,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
    ) -> None:
        self.index = index
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = head_dim**-0.5 if scale is None else scale
        self.rotary = rotary
        self.q_norm, self.k_norm = q_norm, k_norm
        norms = [norm for norm in (q_norm, k_norm) if norm is not None]
        for norm in norms:
            if isinstance(norm, nn.Module) and not is_plain(norm, RMSNorm):
                raise TypeError(
                    f"a norm of heads is a {type(norm).__name__}: attention computes RMSNorm's own forward of its "
                    "weight and eps, and calls no other"
                )
        if len({norm.eps for norm in norms}) > 1:
            raise ValueError(f"q_norm and k_norm have different eps: {norms[0].eps} and {norms[1].eps}")
        self.eps = norms[0].eps if norms else 0.0
        self._chosen_for: AttentionBackend | None = None
        self._path: _Path = self._separate

    def _check(self, spec: AttentionSpec) -> None:
        """Raises ValueError if this layer does not fit a cache made for ``spec``."""
        ours, its = ((x.num_heads, x.num_kv_heads, x.head_dim) for x in (self, spec))
        if ours != its:
            raise ValueError(
                "the attention of layer {} has {} heads and {} KV heads of {}, where config.json says {}, {} and {} "
                "for each rank, for which the cache is made; if it means something else, say so in the model's "
                "read_config".format(self.index, *ours, *its)
            )
        if not 0 <= self.index < spec.num_layers:
            raise ValueError(f"the attention of layer {self.index} has no place in a cache of {spec.num_layers} layers")

    def __call__(
        self, qkv: torch.Tensor, positions: torch.Tensor, backend: AttentionBackend, scale: RowScale | None = None
    ) -> torch.Tensor:
        """qkv: (t, (heads + 2 * kv heads) * head_dim), still to be multiplied by ``scale``, if given; positions: (t,);
        returns (t, heads * head_dim)."""
        if backend is not self._chosen_for:
            self._check(backend.spec)
            if self.scale != backend.spec.scale:
                raise ValueError(
                    f"scale={self.scale} of layer {self.index} is not the backend's, {backend.spec.scale}: keep "
                    "Attention as an attribute of a module, where it is found"
                )
            self._chosen_for = backend
            self._path = self._path_for(backend)
        return self._path(qkv, positions, backend, scale)

    forward = __call__

    def of_stream(
        self,
        x: torch.Tensor,
        norm: RMSNorm,
        projection: QKVParallelLinear,
        positions: torch.Tensor,
        backend: AttentionBackend,
    ) -> torch.Tensor:
        """``self(projection(norm(x)))``: x (t, hidden), positions (t,); returns (t, heads * head_dim)."""
        fresh, some, many = backend.fresh_prompts, False, False
        if self._usual(norm, projection, backend):
            product = (len(x), *projection.weight.shape, x.dtype, x.device)
            in_float8 = projection.weight_scale is not None
            some = not fresh and use_cluster(*product, head_dim=self.head_dim, float8=in_float8)
            many = not some and not in_float8 and use_persistent(*product, head_dim=self.head_dim)
        if not some and not many:
            qkv, scale = projection.unscaled(x, norm)
            return self(qkv, positions, backend, scale)
        heads, weight, folded = self._heads(positions, backend), projection.weight, projection.folded
        if projection.weight_scale is not None:
            rows = quantize(x, norm.weight, norm.eps)
            q = cluster_qkv(rows.values, weight, heads, scales=Scales(rows.scales, projection.weight_scale))
            out = backend.attend(q, self)
        elif some:
            q = cluster_qkv(x if folded else norm(x), weight, heads, norm.eps if folded else None)
            out = backend.attend(q, self)
        else:
            factors = row_factors(x, norm.eps) if folded else None
            q, new_k, new_v = persistent_qkv(x if folded else norm(x), weight, heads, factors, keep=fresh)
            out = backend.attend(q, self, new_k, new_v)
        return out.view(-1, self.num_heads * self.head_dim)

    def of_parts(
        self,
        stream: PartedStream,
        norm: RMSNorm,
        projection: QKVParallelLinear,
        positions: torch.Tensor,
        backend: AttentionBackend,
    ) -> torch.Tensor:
        """``of_stream`` for a large step, projecting each part as it arrives: in one matmul that waits for them, or in
        one library matmul per part. ``projection`` must not be of a subclass."""
        if not stream.under_way:
            return self.of_stream(stream.whole(), norm, projection, positions, backend)
        weight, t, usual = projection.weight, stream.shape[0], self._usual(norm, projection, backend)
        product = (t, *weight.shape, weight.dtype, weight.device)
        if usual and projection.folded and use_persistent(*product, head_dim=self.head_dim, parts=True):
            whole, factors, arrival = stream.hand_over(norm.eps)
            heads, keep = self._heads(positions, backend), backend.fresh_prompts
            q, new_k, new_v = persistent_qkv(whole, weight, heads, factors, keep=keep, arrival=arrival)
            return backend.attend(q, self, new_k, new_v).view(-1, self.num_heads * self.head_dim)
        qkv = weight.new_empty((t, len(weight)))
        for part, x in stream.arriving():
            linear_into(qkv[part.rows], norm(x), weight, projection.bias)
        return self(qkv, positions, backend)

    def _usual(self, norm: RMSNorm, projection: QKVParallelLinear, backend: AttentionBackend) -> bool:
        """Whether the projection's kernel may also apply q/k norm and rotary and write the cache."""
        usual = type(self) is Attention and type(projection) is QKVParallelLinear and projection.bias is None
        usual = usual and is_plain(projection, LinearBase) and is_plain(norm, RMSNorm)
        whole = self.head_dim in HEAD_DIMS and self.rotary.cos_sin.shape[1] == self.head_dim
        same = backend.spec.kv_cache_dtype == "auto"  # what it writes to the cache is of the weight's dtype
        return usual and whole and same and backend.keeps_cache_write()

    def _heads(self, positions: torch.Tensor, backend: AttentionBackend) -> Heads:
        assert backend.batch is not None
        return Heads(
            *self._norms_and_rotary(positions),
            backend.kv_cache[self.index, 0],
            backend.kv_cache[self.index, 1],
            backend.batch.slot_mapping,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
        )

    def _norms_and_rotary(
        self, positions: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, float, torch.Tensor, torch.Tensor]:
        """What q/k norm and rotary need: the norms' weights and eps, the rotary table, and positions (t,)."""
        q_weight, k_weight = (None if norm is None else norm.weight for norm in (self.q_norm, self.k_norm))
        return q_weight, k_weight, self.eps, self.rotary.cos_sin, positions

    def _path_for(self, backend: AttentionBackend) -> _Path:
        if not backend.keeps_cache_write():
            return self._separate
        return self._fused_or_decode if backend.fused_decode_rows else self._fused

    def _fused_or_decode(
        self, qkv: torch.Tensor, positions: torch.Tensor, backend: AttentionBackend, scale: RowScale | None
    ) -> torch.Tensor:
        batch = backend.batch
        assert batch is not None
        rotary_dim = self.rotary.cos_sin.shape[1]
        alone = batch.num_decodes == batch.num_seqs
        biased = scale is not None and scale.bias is not None  # no backend adds a bias
        if not alone or biased or not backend.takes_qkv(batch.num_decodes, scale is not None, rotary_dim):
            return self._fused(qkv, positions, backend, scale)
        more: dict[str, Any] = {} if scale is None else {"scale": scale}
        out = backend.decode_qkv(qkv, *self._norms_and_rotary(positions), self, **more)
        return out.view(-1, self.num_heads * self.head_dim)

    def _fused(
        self, qkv: torch.Tensor, positions: torch.Tensor, backend: AttentionBackend, scale: RowScale | None
    ) -> torch.Tensor:
        fresh = backend.fresh_prompts
        q = qk_norm_rope_store(qkv, *self._heads(positions, backend), scale, fresh)
        if fresh:
            heads = qkv.view(q.shape[0], -1, self.head_dim)
            _, k, v = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
            out = backend.attend(q, self, k, v)
        else:
            out = backend.attend(q, self)
        return out.view(-1, self.num_heads * self.head_dim)

    def _separate(
        self, qkv: torch.Tensor, positions: torch.Tensor, backend: AttentionBackend, scale: RowScale | None
    ) -> torch.Tensor:
        heads = self.num_heads, self.num_kv_heads, self.head_dim
        q, k, v = qk_norm_rope(qkv, *self._norms_and_rotary(positions), *heads, scale)
        return backend.forward(q, k, v, self).view(-1, self.num_heads * self.head_dim)


def attention_scale(model: nn.Module, spec: AttentionSpec) -> float:
    """The scale of the scores in all of a model's layers; ``spec``'s if the model has no ``Attention``.

    Raises:
        ValueError: layers have different scales; two share an index in the cache, or one has none; the cache is made
            for other head counts; a layer's norms or rotary are not modules of the model, so they would get no values.
    """
    found, modules = _attentions(model), set(model.modules())
    for layer in found:
        layer._check(spec)
        for name in ("q_norm", "k_norm", "rotary"):
            if isinstance(part := getattr(layer, name), nn.Module) and part not in modules:
                raise ValueError(
                    f"{name} of the attention of layer {layer.index} is not one of the model's modules: keep it as an "
                    "attribute of one, and do not replace it once Attention has been made with it"
                )
    indices = sorted(layer.index for layer in found)
    if len(set(indices)) < len(indices):
        raise ValueError(f"layers share a place in the cache: the indices of their attention are {indices}")
    scales = {layer.scale for layer in found} or {spec.scale}
    if len(scales) > 1:
        raise ValueError(f"layers whose attention has different scales are not supported: {sorted(scales)}")
    return scales.pop()


def _attentions(model: nn.Module) -> list[Attention]:
    """Every ``Attention`` that is an attribute of a module, or in a list or mapping that is one."""
    found: dict[int, Attention] = {}
    for value in (value for module in model.modules() for value in vars(module).values()):
        held = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else (value,)
        found |= {id(its): its for its in held if isinstance(its, Attention)}
    return list(found.values())


def launch_all_kinds(attention: Attention, projection: QKVParallelLinear, backend: AttentionBackend) -> None:
    """For ``compile_only``, after a step of prompts: launch every variant of the kernel between projection and backend:
    with and without row scales, and with and without keeping k and v, if the backend reads them."""
    if attention._path_for(backend) == attention._separate:
        return
    weight, device = projection.weight, projection.weight.device
    positions = torch.zeros(1, dtype=torch.int64, device=device)
    dtype = getattr(torch, backend.spec.dtype)  # the weight's may be float8
    qkv, x = (torch.zeros((1, n), dtype=dtype, device=device) for n in weight.shape)
    for scale in (None, RowScale(x, 0.0, projection.bias)) if projection.folded else (None,):
        for keep in {False, backend.fresh_prompts}:
            qk_norm_rope_store(qkv, *attention._heads(positions, backend), scale, keep)
