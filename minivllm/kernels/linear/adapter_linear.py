"""LoRA adapters of single requests: adds B @ A @ x to a product, with another A and B for each row (or none).

As in Punica (Chen et al., 2023, https://arxiv.org/abs/2310.18547) it takes two products, of which the first shrinks a
row to its adapter's rank. The adapters of a layer are stacked; a program skips those that no row of its block has, so
that rows of one adapter, as a prompt's, take as long as a product with its weights alone.

The first product is cut along k, so that a few rows still use many multiprocessors; its parts (splits, t, width),
float32, are summed by whoever reads them. The second one triggers late (``kernels/pdl.py``, 5).

Bytes moved: for t rows of one adapter (k + n) * width weights, 2 * t * n for the output, t * k for the input.
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
    a,  # (NUMBER * WIDTH, K)
    places,  # (t,) int32
    out,  # (splits, t, WIDTH) float32
    x_stride,
    t,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    NUMBER: tl.constexpr,
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
    if PDL:
        tl.extra.cuda.gdc_wait()
    k = split * PART + tl.arange(0, STEP)
    from_x = x + rows.to(tl.int64)[:, None] * x_stride + k[None, :]
    found = tl.zeros((ROWS, COLUMNS), tl.float32)
    for number in range(1, NUMBER + 1):
        if _has(its, number):
            from_a = a + ((number - 1) * WIDTH + columns).to(tl.int64)[None, :] * K + k[:, None]
            sums = tl.zeros((ROWS, COLUMNS), tl.float32)
            for at in range(0, PART, STEP):
                left = k + at < K
                part_x = tl.load(from_x + at, mask=here[:, None] & left[None, :], other=0.0)
                part_a = tl.load(from_a + at, mask=inside[None, :] & left[:, None], other=0.0)
                sums = tl.dot(part_x, part_a, sums, input_precision="ieee")
            found = tl.where((its == number)[:, None], sums, found)
    to = out + (split * t + rows).to(tl.int64)[:, None] * WIDTH + columns[None, :]
    tl.store(to, found, mask=here[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["t"])
def _expand_kernel(
    y,  # (t, N), to which it adds
    h,  # (SPLITS, t, WIDTH) float32
    b,  # (NUMBER, N, WIDTH)
    places,  # (t,) int32
    t,
    N,
    SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
    NUMBER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    here, inside = rows < t, columns < N
    its = tl.load(places + rows, mask=here, other=0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if tl.max(its, axis=0) > 0:
        found = tl.zeros((ROWS, COLUMNS), tl.float32)
        for at in range(0, WIDTH, STEP):
            w = at + tl.arange(0, STEP)
            shrunk = tl.zeros((ROWS, STEP), tl.float32)
            for split in tl.static_range(SPLITS):
                from_h = h + (split * t + rows).to(tl.int64)[:, None] * WIDTH + w[None, :]
                shrunk += tl.load(from_h, mask=here[:, None] & (w < WIDTH)[None, :], other=0.0)
            shrunk_ = shrunk.to(b.dtype.element_ty)
            for number in range(1, NUMBER + 1):
                if _has(its, number):
                    from_b = b + ((number - 1) * N + columns).to(tl.int64)[None, :] * WIDTH + w[:, None]
                    part = tl.load(from_b, mask=inside[None, :] & (w < WIDTH)[:, None], other=0.0)
                    mine = tl.where((its == number)[:, None], shrunk_, tl.zeros_like(shrunk_))
                    found = tl.dot(mine, part, found, input_precision="ieee")
        to = y + rows.to(tl.int64)[:, None] * N + columns[None, :]
        mask = here[:, None] & inside[None, :]
        tl.store(to, (tl.load(to, mask=mask, other=0.0).to(tl.float32) + found).to(y.dtype.element_ty), mask=mask)


def add_adapters_triton(
    y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, places: torch.Tensor
) -> torch.Tensor:
    (t, k), (number, width, _), n = x.shape, a.shape, y.shape[1]
    if not t:
        return y
    rows, wide = (16, 64) if t <= _FEW else (64, 128)
    columns, pdl = min(max(next_power_of_2(width), 16), 64), use_pdl(x.device)
    blocks = cdiv(t, rows), cdiv(width, columns)
    part = _part_of(k, blocks[0] * blocks[1], num_sms(x.device))
    splits = cdiv(k, part)
    h = torch.empty((splits, t, width), dtype=torch.float32, device=x.device)
    _shrink_kernel[(*blocks, splits)](
        x, a, places, h, x.stride(0), t, K=k, WIDTH=width, NUMBER=number, PART=part, ROWS=rows, COLUMNS=columns,
        STEP=_STEP if x.dtype.itemsize < 4 else 32, PDL=pdl, launch_pdl=pdl,
    )  # fmt: skip
    _expand_kernel[(blocks[0], cdiv(n, wide))](
        y, h, b, places, t, n, SPLITS=splits, WIDTH=width, NUMBER=number, ROWS=rows, COLUMNS=wide, STEP=columns,
        PDL=pdl, launch_pdl=pdl,
    )  # fmt: skip
    return y


def _part_of(k: int, blocks: int, sms: int) -> int:
    """How much of k a program gets, a power of two of ``_STEP``, so that ``blocks`` of them fill the GPU about once."""
    wanted = min(_MOST_SPLITS, max(sms // blocks, 1))
    return _STEP * next_power_of_2(cdiv(cdiv(k, wanted), _STEP))


def add_adapters_reference(
    y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, places: torch.Tensor
) -> torch.Tensor:
    for number in range(len(a)):
        rows = (places == number + 1).nonzero().flatten()
        if len(rows):
            y[rows] += x[rows] @ a[number].T @ b[number].T
    return y


def add_adapters(
    y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, places: torch.Tensor
) -> torch.Tensor:
    """Add to each row of y (t, n) its adapter's ``b @ a @ x``, in place; returns y.

    x (t, k), its rows contiguous; a (adapters, width, k) and b (adapters, n, width), all of one dtype; places (t,)
    int32: which adapter each row has, from 1 on; 0: none.
    """
    run = add_adapters_triton if y.is_cuda else add_adapters_reference
    return run(y, x, a, b, places)
