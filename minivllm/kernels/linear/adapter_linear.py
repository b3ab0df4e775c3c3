"""LoRA adapters of single requests: adds B @ A @ x to a product, with another A and B for each row (or none).

As in Punica (Chen et al., 2023, https://arxiv.org/abs/2310.18547) it takes two kernels. The first shrinks a row to its
adapter's rank, and is best launched before the product, whose kernel then loads weights meanwhile; the second expands
it, and adds it to the product. The adapters of a layer are stacked; a program skips those that no row of its block has,
so that rows of one adapter, as a prompt's, take as long as a product with its weights alone.

The first is cut along k, so that a few rows still use many multiprocessors; its parts (splits, t, width), float32, are
summed by the second, which triggers late (``kernels/pdl.py``, 5).

Bytes moved: for t rows of one adapter (k + n) * width weights, t * k for the input, 2 * t * n for the output.
"""

import torch

from minivllm.kernels._triton import next_power_of_2, num_sms, tl, triton
from minivllm.kernels.pdl import use_pdl
from minivllm.rounding import cdiv

_STEP = 128  # columns of x at a time
_MOST_SPLITS = 16  # of k
_FEW = 256  # rows, in blocks of 16: each has few adapters, and there are many blocks


@triton.jit
def _has(places, number):
    """Whether any row of the block has this adapter."""
    return tl.max(tl.where(places == number, 1, 0), axis=0) > 0


@triton.jit(do_not_specialize=["t"])
def _shrink_kernel(
    x,  # (t, K)
    a,  # (adapters, WIDTH, K)
    places,  # (t,) int32
    out,  # (splits, t, WIDTH) float32
    x_stride,
    t,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,  # of K, per split
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    split = tl.program_id(2)
    here, inside = rows < t, columns < WIDTH
    its = tl.load(places + rows, mask=here, other=0)
    last = tl.max(its, axis=0)  # the only one, mostly: its first weights are loaded ahead
    k = split * PART + tl.arange(0, STEP)
    of_a = columns.to(tl.int64)[None, :] * K + k[:, None]
    wanted = inside[None, :] & (k < K)[:, None]
    each = tl.full((), WIDTH * K, tl.int64)
    from_a = a + (tl.maximum(last, 1) - 1) * each + of_a
    part_a = tl.load(from_a, mask=wanted, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    found = tl.zeros((ROWS, COLUMNS), tl.float32)
    if last > 0:
        from_x = x + rows.to(tl.int64)[:, None] * x_stride + k[None, :]
        first_x = tl.load(from_x, mask=here[:, None] & (k < K)[None, :], other=0.0)
        sums = tl.dot(first_x, part_a, input_precision="ieee")
        for at in range(STEP, PART, STEP):
            left = k + at < K
            part_x = tl.load(from_x + at, mask=here[:, None] & left[None, :], other=0.0)
            part_a = tl.load(from_a + at, mask=inside[None, :] & left[:, None], other=0.0)
            sums = tl.dot(part_x, part_a, sums, input_precision="ieee")
        found = tl.where((its == last)[:, None], sums, found)
        for number in range(1, last):
            if _has(its, number):
                from_a = a + (number - 1) * each + of_a
                sums = tl.zeros((ROWS, COLUMNS), tl.float32)
                for at in range(0, PART, STEP):
                    left = k + at < K
                    part_x = tl.load(from_x + at, mask=here[:, None] & left[None, :], other=0.0)
                    part_a = tl.load(from_a + at, mask=inside[None, :] & left[:, None], other=0.0)
                    sums = tl.dot(part_x, part_a, sums, input_precision="ieee")
                found = tl.where((its == number)[:, None], sums, found)
    to = out + (split * t + rows).to(tl.int64)[:, None] * WIDTH + columns[None, :]
    tl.store(to, found, mask=here[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["t", "N"])
def _expand_kernel(
    y,  # (t, N), to which it adds
    h,  # (SPLITS, t, WIDTH) float32
    b,  # (adapters, N, WIDTH)
    places,  # (t,) int32
    t,
    N,
    SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    here, inside = rows < t, columns < N
    its = tl.load(places + rows, mask=here, other=0)
    last = tl.max(its, axis=0)
    w = tl.arange(0, STEP)
    of_b = columns.to(tl.int64)[None, :] * WIDTH + w[:, None]
    each = tl.full((), WIDTH, tl.int64) * N
    from_b = b + (tl.maximum(last, 1) - 1) * each + of_b
    part = tl.load(from_b, mask=inside[None, :] & (w < WIDTH)[:, None], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if last > 0:
        found = tl.zeros((ROWS, COLUMNS), tl.float32)
        for at in tl.static_range(0, WIDTH, STEP):
            left = at + w < WIDTH
            if at > 0:
                part = tl.load(from_b + at, mask=inside[None, :] & left[:, None], other=0.0)
            shrunk = tl.zeros((ROWS, STEP), tl.float32)
            for split in tl.static_range(SPLITS):
                from_h = h + (split * t + rows).to(tl.int64)[:, None] * WIDTH + (at + w)[None, :]
                shrunk += tl.load(from_h, mask=here[:, None] & left[None, :], other=0.0)
            factors = shrunk.to(b.dtype.element_ty)
            none = tl.zeros_like(factors)
            found = tl.dot(tl.where((its == last)[:, None], factors, none), part, found, input_precision="ieee")
            for number in range(1, last):
                if _has(its, number):
                    from_other = b + (number - 1) * each + of_b + at
                    other = tl.load(from_other, mask=inside[None, :] & left[:, None], other=0.0)
                    mine = tl.where((its == number)[:, None], factors, none)
                    found = tl.dot(mine, other, found, input_precision="ieee")
        to = y + rows.to(tl.int64)[:, None] * N + columns[None, :]
        mask = here[:, None] & inside[None, :]
        tl.store(to, (tl.load(to, mask=mask, other=0.0).to(tl.float32) + found).to(y.dtype.element_ty), mask=mask)


def _part_of(k: int, blocks: int, sms: int) -> int:
    """How much of k a program gets, a power of two of ``_STEP``, so that ``blocks`` of them fill the GPU about once."""
    wanted = min(_MOST_SPLITS, max(sms // blocks, 1))
    return _STEP * next_power_of_2(cdiv(cdiv(k, wanted), _STEP))


def _columns_of(width: int) -> int:
    return min(max(next_power_of_2(width), 16), 64)


def shrink_triton(x: torch.Tensor, a: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    (t, k), width, pdl = x.shape, a.shape[1], use_pdl(x.device)
    rows, columns = 16 if t <= _FEW else 64, _columns_of(width)
    blocks = cdiv(t, rows), cdiv(width, columns)
    part = _part_of(k, max(blocks[0] * blocks[1], 1), num_sms(x.device))
    h = torch.empty((cdiv(k, part), t, width), dtype=torch.float32, device=x.device)
    if t:
        _shrink_kernel[(*blocks, len(h))](
            x, a, places, h, x.stride(0), t, K=k, WIDTH=width, PART=part, ROWS=rows, COLUMNS=columns,
            STEP=_STEP if x.dtype.itemsize < 4 else 32, PDL=pdl, launch_pdl=pdl,
        )  # fmt: skip
    return h


def expand_triton(y: torch.Tensor, h: torch.Tensor, b: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    (t, n), (splits, _, width), pdl = y.shape, h.shape, use_pdl(y.device)
    rows, columns = (16, 64) if t <= _FEW else (64, 128)
    if t:
        _expand_kernel[(cdiv(t, rows), cdiv(n, columns))](
            y, h, b, places, t, n, SPLITS=splits, WIDTH=width, ROWS=rows, COLUMNS=columns, STEP=_columns_of(width),
            PDL=pdl, launch_pdl=pdl,
        )  # fmt: skip
    return y


def shrink_reference(x: torch.Tensor, a: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    h = torch.zeros((1, len(x), a.shape[1]), dtype=torch.float32, device=x.device)
    for number in range(len(a)):
        rows = (places == number + 1).nonzero().flatten()
        h[0, rows] = (x[rows] @ a[number].T).float()
    return h


def expand_reference(y: torch.Tensor, h: torch.Tensor, b: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    for number in range(len(b)):
        rows = (places == number + 1).nonzero().flatten()
        y[rows] += h.sum(0)[rows].to(b.dtype) @ b[number].T
    return y


def shrink(x: torch.Tensor, a: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """x (t, k), its rows contiguous; a (adapters, width, k), of the same dtype; places (t,) int32: which adapter each
    row has, from 1 on; 0: none. Returns its ``a @ x``, (splits, t, width) float32, still to be summed over splits."""
    return (shrink_triton if x.is_cuda else shrink_reference)(x, a, places)


def expand(y: torch.Tensor, h: torch.Tensor, b: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Add to each row of y (t, n) its adapter's ``b @ h``, in place; returns y. h is of ``shrink``; b (adapters, n,
    width) of y's dtype."""
    return (expand_triton if y.is_cuda else expand_reference)(y, h, b, places)
