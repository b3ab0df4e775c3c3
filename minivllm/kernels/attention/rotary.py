"""All between the packed QKV projection and attention, in one pass: split, per-head RMSNorm of q and k (Qwen3), rotary
embedding (neox: first half with second half), and writing keys and values to the paged cache.

Bytes moved: 2 * t * (heads + 2 * kv heads) * head_dim elements. 8192 tokens of 16 + 2 * 8 heads of 128 in bf16: 134 MB,
31 µs at 4.3 TB/s. One program handles a token and a group of q heads, or of k and v heads. With a ``RowScale`` it also
reads the token's whole row of x; it scales q, k and v and adds their bias before anything else.
"""

from typing import NamedTuple

import torch

from minivllm.kernels._triton import next_power_of_2, tl, triton
from minivllm.kernels.attention.cache_write import write_cache_reference
from minivllm.kernels.pdl import use_pdl
from minivllm.kernels.rms_norm import RowScale, inverse_rms, rms_norm_reference
from minivllm.rounding import cdiv


class Heads(NamedTuple):
    """The arguments of ``qk_norm_rope_store`` other than the projection."""

    q_weight: torch.Tensor | None  # (head_dim,), of the query norm
    k_weight: torch.Tensor | None
    eps: float
    cos_sin: torch.Tensor  # (positions, head_dim) float32
    positions: torch.Tensor  # (t,) int64
    k_cache: torch.Tensor  # (blocks, block_size, kv heads, head_dim)
    v_cache: torch.Tensor  # with the same strides
    slot_mapping: torch.Tensor  # (t,) int64
    num_heads: int
    num_kv_heads: int
    head_dim: int


@triton.jit
def normed_rotated(heads, live, weight, angles, eps, D: tl.constexpr, ROT: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load heads from the pointers ``heads`` (rows, 1), where ``live``, else zeros; norm them if there is a weight, and
    rotate them. Returns (rows, BLOCK_D). Each column is loaded along with the one that it is rotated with."""
    d = tl.arange(0, BLOCK_D)[None, :]
    half = ROT // 2
    other = tl.where(d < half, d + half, d - half)
    turns = d < ROT
    cos = tl.load(angles + d % half, mask=turns, other=1.0)
    sin = tl.load(angles + half + d % half, mask=turns, other=0.0)
    x = tl.load(heads + d, mask=live & (d < D), other=0.0).to(tl.float32)
    y = tl.load(heads + other, mask=live & turns, other=0.0).to(tl.float32)
    dtype = heads.dtype.element_ty
    if weight is not None:
        scale = (1.0 / tl.sqrt(tl.sum(x * x, 1) / D + eps))[:, None]
        x = ((x * scale).to(dtype) * tl.load(weight + d, mask=d < D, other=0.0)).to(dtype).to(tl.float32)
        y = ((y * scale).to(dtype) * tl.load(weight + other, mask=turns, other=0.0)).to(dtype).to(tl.float32)
    return (x * cos + tl.where(d < half, -y, y) * sin).to(dtype)


@triton.jit(do_not_specialize=["eps", "x_eps"], do_not_specialize_on_alignment=["positions", "slot_mapping"])
def _qk_norm_rope_kernel(
    qkv,  # (t, (H + 2 KV) * D)
    x,  # (t, K), read if K
    bias,  # ((H + 2 KV) * D,), added after scaling; or None
    q_weight,  # (D,), read if Q_NORM
    k_weight,
    cos_sin,  # (positions, ROT) float32
    positions,  # (t,)
    q_out,  # (t, H, D)
    k_cache,  # (blocks, BLOCK_SIZE, KV, D) if STORE, else (t, 1, KV, D)
    v_cache,  # the same, written only if STORE or K
    slot_mapping,  # (t,), read if STORE
    eps,
    x_eps,
    qkv_stride,
    x_stride,
    cos_sin_stride,
    k_stride_block,
    k_stride_slot,
    k_stride_head,
    v_stride_block,
    v_stride_slot,
    v_stride_head,
    BLOCK_SIZE: tl.constexpr,
    H: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    ROT: tl.constexpr,
    K: tl.constexpr,  # 0: qkv needs no scale
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    STORE: tl.constexpr,
    KEEP: tl.constexpr,  # also write k, and v if scaled, back to qkv
    HB: tl.constexpr,  # heads per program, a power of two
    BLOCK_R: tl.constexpr,  # ROT // 2 padded to a power of two
    BLOCK_P: tl.constexpr,  # D - ROT padded to a power of two, 0 if the whole head rotates
    BLOCK_D: tl.constexpr,  # D padded to a power of two
    BLOCK_K: tl.constexpr,  # K padded to a power of two
    Q_GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # late: attention reads block tables before its own wait
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    is_q = group < Q_GROUPS
    heads = tl.where(is_q, group, group - Q_GROUPS) * HB + tl.arange(0, HB)
    live = heads < tl.where(is_q, H, KV)

    if K:
        c = tl.arange(0, BLOCK_K)
        h = tl.load(x + token * x_stride + c, mask=c < K, other=0.0).to(tl.float32)
    r = tl.arange(0, BLOCK_R)
    in_rot = r < ROT // 2
    first = r[None, :]
    mask = live[:, None] & in_rot[None, :]
    source = qkv + token * qkv_stride + (tl.where(is_q, 0, H) + heads)[:, None] * D
    x1 = tl.load(source + first, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(source + ROT // 2 + first, mask=mask, other=0.0).to(tl.float32)
    angles = cos_sin + tl.load(positions + token).to(tl.int64) * cos_sin_stride
    cos = tl.load(angles + r, mask=in_rot, other=0.0)[None, :]
    sin = tl.load(angles + ROT // 2 + r, mask=in_rot, other=0.0)[None, :]

    if BLOCK_P > 0:
        p = tl.arange(0, BLOCK_P if BLOCK_P > 0 else 1)
        in_pass = p < D - ROT
        pass_mask = live[:, None] & in_pass[None, :]
        x3 = tl.load(source + ROT + p[None, :], mask=pass_mask, other=0.0).to(tl.float32)

    if K:
        row_scale = inverse_rms(h, x_eps, K)
        x1 *= row_scale
        x2 *= row_scale
        if BLOCK_P > 0:
            x3 *= row_scale
        if bias is not None:
            its_bias = bias + (tl.where(is_q, 0, H) + heads)[:, None] * D
            x1 += tl.load(its_bias + first, mask=mask, other=0.0).to(tl.float32)
            x2 += tl.load(its_bias + ROT // 2 + first, mask=mask, other=0.0).to(tl.float32)
            if BLOCK_P > 0:
                x3 += tl.load(its_bias + ROT + p[None, :], mask=pass_mask, other=0.0).to(tl.float32)

    if Q_NORM or K_NORM:
        square = tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)
        if BLOCK_P > 0:
            square += tl.sum(x3 * x3, 1)
        scale = (1.0 / tl.sqrt(square / D + eps))[:, None]
        wanted = (is_q & Q_NORM) | ((group >= Q_GROUPS) & K_NORM)
        weight = q_weight
        if not is_q:
            weight = k_weight
        dtype = qkv.dtype.element_ty
        if wanted:
            w1 = tl.load(weight + r, mask=in_rot, other=0.0)[None, :]
            w2 = tl.load(weight + ROT // 2 + r, mask=in_rot, other=0.0)[None, :]
            x1 = ((x1 * scale).to(dtype) * w1).to(dtype).to(tl.float32)
            x2 = ((x2 * scale).to(dtype) * w2).to(dtype).to(tl.float32)
            if BLOCK_P > 0:
                w3 = tl.load(weight + ROT + p, mask=in_pass, other=0.0)[None, :]
                x3 = ((x3 * scale).to(dtype) * w3).to(dtype).to(tl.float32)

    y1 = (x1 * cos - x2 * sin).to(q_out.dtype.element_ty)
    y2 = (x2 * cos + x1 * sin).to(q_out.dtype.element_ty)
    if is_q:
        to = q_out + token * (H * D) + heads[:, None] * D
        tl.store(to + first, y1, mask=mask)
        tl.store(to + ROT // 2 + first, y2, mask=mask)
        if BLOCK_P > 0:
            tl.store(to + ROT + p[None, :], x3.to(q_out.dtype.element_ty), mask=pass_mask)
    else:
        if STORE:
            slot = tl.load(slot_mapping + token).to(tl.int64)
        else:
            slot = token * BLOCK_SIZE
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        kept = k_cache + block * k_stride_block + offset * k_stride_slot + heads[:, None] * k_stride_head
        tl.store(kept + first, y1, mask=mask)
        tl.store(kept + ROT // 2 + first, y2, mask=mask)
        if BLOCK_P > 0:
            tl.store(kept + ROT + p[None, :], x3.to(q_out.dtype.element_ty), mask=pass_mask)
        if STORE or K:
            d = tl.arange(0, BLOCK_D)[None, :]
            value_mask = live[:, None] & (d < D)
            value = tl.load(source + KV * D + d, mask=value_mask, other=0.0)
            if K:
                scaled = value.to(tl.float32) * row_scale
                if bias is not None:
                    scaled += tl.load(its_bias + KV * D + d, mask=value_mask, other=0.0).to(tl.float32)
                value = scaled.to(q_out.dtype.element_ty)
            kept = v_cache + block * v_stride_block + offset * v_stride_slot + heads[:, None] * v_stride_head
            tl.store(kept + d, value, mask=value_mask)
        if KEEP:
            tl.debug_barrier()  # other warps with the same elements may still have to read them
            tl.store(source + first, y1, mask=mask)
            tl.store(source + ROT // 2 + first, y2, mask=mask)
            if BLOCK_P > 0:
                tl.store(source + ROT + p[None, :], x3.to(q_out.dtype.element_ty), mask=pass_mask)
            if K:
                tl.store(source + KV * D + d, value, mask=value_mask)


def qk_norm_rope_store_triton(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    scale: RowScale | None = None,
    keep: bool = False,
) -> torch.Tensor:
    """Without slot_mapping, k (and v if scaled) go to "caches" of one slot per token, (t, 1, kv heads, head_dim)."""
    t, rot = qkv.shape[0], cos_sin.shape[1]
    q = torch.empty((t, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if not t:
        return q
    block_d = next_power_of_2(head_dim)
    hb = min(max(1024 // block_d, 1), next_power_of_2(num_heads))
    q_groups = cdiv(num_heads, hb)
    pdl = use_pdl(qkv.device)
    x, x_eps, bias = (qkv, 0.0, None) if scale is None else scale
    k = 0 if scale is None else x.shape[1]
    unread = q_weight if q_weight is not None else k_weight if k_weight is not None else qkv
    _qk_norm_rope_kernel[(t, q_groups + cdiv(num_kv_heads, hb))](
        qkv,
        x,
        bias,
        q_weight if q_weight is not None else unread,
        k_weight if k_weight is not None else unread,
        cos_sin,
        positions,
        q,
        k_cache,
        v_cache,
        slot_mapping if slot_mapping is not None else positions,
        eps,
        x_eps,
        qkv.stride(0),
        x.stride(0),
        cos_sin.stride(0),
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        BLOCK_SIZE=k_cache.shape[1],
        H=num_heads,
        KV=num_kv_heads,
        D=head_dim,
        ROT=rot,
        K=k,
        Q_NORM=q_weight is not None,
        K_NORM=k_weight is not None,
        STORE=slot_mapping is not None,
        KEEP=keep,
        HB=hb,
        BLOCK_R=next_power_of_2(rot // 2),
        BLOCK_P=next_power_of_2(head_dim - rot) if rot < head_dim else 0,
        BLOCK_D=block_d,
        BLOCK_K=next_power_of_2(k),
        Q_GROUPS=q_groups,
        PDL=pdl,
        num_warps=2,
        launch_pdl=pdl,
    )
    return q


def qk_norm_rope_triton(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    scale: RowScale | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    t = qkv.shape[0]
    made = torch.empty((1 if scale is None else 2, t, 1, num_kv_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    k, v = made[0], made[-1]
    q = qk_norm_rope_store_triton(
        qkv, q_weight, k_weight, eps, cos_sin, positions, k, v, None, num_heads, num_kv_heads, head_dim, scale
    )
    if scale is None:
        v = qkv[:, None, (num_heads + num_kv_heads) * head_dim :].unflatten(2, (num_kv_heads, head_dim))
    return q, k[:, 0], v[:, 0]


def rotate_reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x (t, heads, head_dim), cos and sin (t, 1, rot_dim / 2) float32: rotates the first rot_dim of each head."""
    half = cos.shape[-1]
    x1, x2 = x[..., :half].float(), x[..., half : 2 * half].float()
    turned = torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype)
    return turned if 2 * half == x.shape[-1] else torch.cat((turned, x[..., 2 * half :]), dim=-1)


def qk_norm_rope_reference(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    scale: RowScale | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if scale is not None:
        qkv = scale.applied_to(qkv)
    heads = qkv.unflatten(1, (num_heads + 2 * num_kv_heads, head_dim))
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if q_weight is not None:
        q = rms_norm_reference(q, q_weight, eps)
    if k_weight is not None:
        k = rms_norm_reference(k, k_weight, eps)
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    return rotate_reference(q, cos, sin), rotate_reference(k, cos, sin), v


def qk_norm_rope_store_reference(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    scale: RowScale | None = None,
    keep: bool = False,
) -> torch.Tensor:
    q, k, v = qk_norm_rope_reference(
        qkv, q_weight, k_weight, eps, cos_sin, positions, num_heads, num_kv_heads, head_dim, scale
    )
    write_cache_reference(k, v, k_cache, v_cache, slot_mapping)
    if keep:
        qkv[:, num_heads * head_dim :] = torch.cat((k, v), dim=1).flatten(1)
    return q


def qk_norm_rope_store(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    scale: RowScale | None = None,
    keep: bool = False,
) -> torch.Tensor:
    """qkv (t, (heads + 2 kv heads) * head_dim) -> q (t, heads, head_dim), normed if weights are given, and rotated;
    writes k (likewise) and v to the caches (num_blocks, block_size, kv heads, head_dim) at slot_mapping (t,) int64.
    cos_sin: (max_position, rot_dim) float32, cosines first; rot_dim <= head_dim; positions: (t,) int64. ``scale``, if
    given, is applied to qkv first. With ``keep``, k and v in qkv are also replaced by what is in the cache."""
    run = qk_norm_rope_store_triton if qkv.is_cuda else qk_norm_rope_store_reference
    return run(
        qkv,
        q_weight,
        k_weight,
        eps,
        cos_sin,
        positions,
        k_cache,
        v_cache,
        slot_mapping,
        num_heads,
        num_kv_heads,
        head_dim,
        scale,
        keep,
    )


def qk_norm_rope(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    scale: RowScale | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same without the cache: returns q, k, v of (t, heads, head_dim); without a ``scale`` v is a view of qkv."""
    run = qk_norm_rope_triton if qkv.is_cuda else qk_norm_rope_reference
    return run(qkv, q_weight, k_weight, eps, cos_sin, positions, num_heads, num_kv_heads, head_dim, scale)
