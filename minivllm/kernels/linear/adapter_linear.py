"""LoRA adapters of single requests: adds B @ A @ x to a product, with another A and B for each row (or none).

As in Punica (Chen et al., 2023, https://arxiv.org/abs/2310.18547) it takes two kernels. The first shrinks a row to its
adapter's rank, and is best launched before the product, whose kernel then loads weights meanwhile; the second expands
it, and adds it to the product. Both take rows in the order of their adapters, so that most blocks of rows have one,
whose weights they read once.

The first is cut along k, so that a few rows still use many multiprocessors; its parts (splits, t, width), float32, are
summed by the second, which triggers late (``kernels/pdl.py``, 5). For few rows each loads its first weights ahead.

Bytes moved: for t rows of one adapter (k + n) * width weights, t * k for the input, 2 * t * n for the output.
"""

import torch

from minivllm.kernels._triton import next_power_of_2, tl, triton
from minivllm.kernels.pdl import use_pdl
from minivllm.rounding import cdiv

_STEP = 128  # columns of x at a time
_FEW = 256  # rows, in blocks of 16
_SPLITS, _SPLITS_OF_MANY = 16, 4  # of k, at most; of many rows the second kernel takes longer to read them all


@triton.jit
def _has(places, number):
    """Whether any row of the block has this adapter."""
    return tl.max(tl.where(places == number, 1, 0), axis=0) > 0


@triton.jit(do_not_specialize=["t"])
def _shrink_kernel(
    x,  # (t, K)
    a,  # (adapters, WIDTH, K)
    order,  # (2, t) int32: rows, and their places
    out,  # (splits, t, WIDTH) float32
    x_stride,
    t,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,  # of K, per split
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    at_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    split = tl.program_id(2)
    here, inside = at_row < t, columns < WIDTH
    rows = tl.load(order + at_row, mask=here, other=0).to(tl.int64)
    its = tl.load(order + t + at_row, mask=here, other=0)
    last = tl.max(its, axis=0)  # mostly the only one
    k = split * PART + tl.arange(0, STEP)
    of_a = columns.to(tl.int64)[None, :] * K + k[:, None]
    each = tl.full((), WIDTH * K, tl.int64)
    from_last = a + (tl.maximum(last, 1) - 1) * each + of_a
    if AHEAD:
        first_a = tl.load(from_last, mask=inside[None, :] & (k < K)[:, None], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    from_x = x + rows[:, None] * x_stride + k[None, :]
    found = tl.zeros((ROWS, COLUMNS), tl.float32)
    end = last + 1
    if AHEAD:
        end = last
        first_x = tl.load(from_x, mask=here[:, None] & (k < K)[None, :], other=0.0)
        sums = tl.dot(first_x, first_a, input_precision="ieee")
        for at in range(STEP, PART, STEP):
            left = k + at < K
            part_x = tl.load(from_x + at, mask=here[:, None] & left[None, :], other=0.0)
            part_a = tl.load(from_last + at, mask=inside[None, :] & left[:, None], other=0.0)
            sums = tl.dot(part_x, part_a, sums, input_precision="ieee")
        found = tl.where(((its == last) & (its > 0))[:, None], sums, found)
    for number in range(1, end):
        if _has(its, number):
            from_a = a + (number - 1) * each + of_a
            sums = tl.zeros((ROWS, COLUMNS), tl.float32)
            for at in range(0, PART, STEP):
                left = k + at < K
                part_x = tl.load(from_x + at, mask=here[:, None] & left[None, :], other=0.0)
                part_a = tl.load(from_a + at, mask=inside[None, :] & left[:, None], other=0.0)
                sums = tl.dot(part_x, part_a, sums, input_precision="ieee")
            found = tl.where((its == number)[:, None], sums, found)
    to = out + (split * t + rows)[:, None] * WIDTH + columns[None, :]
    tl.store(to, found, mask=here[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["t"])  # of N it has to know whether rows are aligned
def _expand_kernel(
    y,  # (t, N), to which it adds
    h,  # (SPLITS, t, WIDTH) float32
    b,  # (adapters, N, WIDTH)
    order,  # (2, t) int32: rows, and their places
    t,
    N,
    SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    at_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    here, inside = at_row < t, columns < N
    rows = tl.load(order + at_row, mask=here, other=0).to(tl.int64)
    its = tl.load(order + t + at_row, mask=here, other=0)
    last = tl.max(its, axis=0)
    w = tl.arange(0, STEP)
    of_b = columns.to(tl.int64)[None, :] * WIDTH + w[:, None]
    each = tl.full((), WIDTH, tl.int64) * N
    from_last = b + (tl.maximum(last, 1) - 1) * each + of_b
    if AHEAD:
        first = tl.load(from_last, mask=inside[None, :] & (w < WIDTH)[:, None], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if last > 0:
        to = y + rows[:, None] * N + columns[None, :]
        mask = here[:, None] & inside[None, :]
        before = tl.load(to, mask=mask, other=0.0)
        found = tl.zeros((ROWS, COLUMNS), tl.float32)
        for at in tl.static_range(0, WIDTH, STEP):
            left = at + w < WIDTH
            if AHEAD and at == 0:
                part = first
            else:
                part = tl.load(from_last + at, mask=inside[None, :] & left[:, None], other=0.0)
            shrunk = tl.zeros((ROWS, STEP), tl.float32)
            for split in tl.static_range(SPLITS):
                from_h = h + (split * t + rows)[:, None] * WIDTH + (at + w)[None, :]
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
        tl.store(to, (before.to(tl.float32) + found).to(y.dtype.element_ty), mask=mask)


def _columns_of(width: int) -> int:
    return min(max(next_power_of_2(width), 16), 64)


def shrink_triton(x: torch.Tensor, a: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    (t, k), width, pdl = x.shape, a.shape[1], use_pdl(x.device)
    rows, columns = 16 if t <= _FEW else 64, _columns_of(width)
    blocks = cdiv(t, rows), cdiv(width, columns)
    part = cdiv(cdiv(k, _SPLITS if t <= _FEW else _SPLITS_OF_MANY), _STEP) * _STEP
    h = torch.empty((cdiv(k, part), t, width), dtype=torch.float32, device=x.device)
    if t:
        _shrink_kernel[(*blocks, len(h))](
            x, a, order, h, x.stride(0), t, K=k, WIDTH=width, PART=part, ROWS=rows, COLUMNS=columns,
            STEP=_STEP if x.dtype.itemsize < 4 else 32, AHEAD=t <= _FEW, PDL=pdl, launch_pdl=pdl,
        )  # fmt: skip
    return h


def expand_triton(y: torch.Tensor, h: torch.Tensor, b: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    (t, n), (splits, _, width), pdl = y.shape, h.shape, use_pdl(y.device)
    rows, columns = 16 if t <= _FEW else 32, 64 if t <= 16 else 128
    if t:
        _expand_kernel[(cdiv(t, rows), cdiv(n, columns))](
            y, h, b, order, t, n, SPLITS=splits, WIDTH=width, ROWS=rows, COLUMNS=columns, STEP=_columns_of(width),
            AHEAD=t <= _FEW, PDL=pdl, launch_pdl=pdl,
        )  # fmt: skip
    return y


def shrink_reference(x: torch.Tensor, a: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    h = torch.zeros((1, len(x), a.shape[1]), dtype=torch.float32, device=x.device)
    for number in range(len(a)):
        rows = order[0, order[1] == number + 1]
        h[0, rows] = (x[rows] @ a[number].T).float()
    return h


def expand_reference(y: torch.Tensor, h: torch.Tensor, b: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    for number in range(len(b)):
        rows = order[0, order[1] == number + 1]
        y[rows] += h.sum(0)[rows].to(b.dtype) @ b[number].T
    return y


def shrink(x: torch.Tensor, a: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Each row's ``a @ x``, (splits, t, width) float32, still to be summed over splits.

    x (t, k), its rows contiguous; a (adapters, width, k), of the same dtype; order (2, t) int32, contiguous: every row,
    best those of one adapter next to each other, and which each has, from 1 on; 0: none.
    """
    return (shrink_triton if x.is_cuda else shrink_reference)(x, a, order)


def expand(y: torch.Tensor, h: torch.Tensor, b: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Add to each row of y (t, n) its adapter's ``b @ h``, in place; returns y. h is of ``shrink``; b (adapters, n,
    width) of y's dtype."""
    return (expand_triton if y.is_cuda else expand_reference)(y, h, b, order)
