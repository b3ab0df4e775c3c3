"""The first kernel of a step with prompts: each token's position and place in the cache, and each row's blocks, from
the rows' lengths and slots.

A program handles 128 tokens, or a row's blocks. Bytes: 16 per token written, 8 per block of context: launch-bound, 2-4
µs, except for hundreds of long contexts. It does not let the next kernel start early (PDL): kernels after it read its
results before they wait for the ones before them.
"""

import torch

from minivllm.kernels._triton import tl, triton
from minivllm.rounding import cdiv

_TOKENS = 128  # per program


@triton.jit(do_not_specialize=["table_stride", "out_stride", "rows", "tokens"])
def _prompt_inputs_kernel(
    query_start, seq_lens, slots, block_table, table_stride, positions, slot_mapping, block_tables, out_stride,
    ends, rows, tokens, SIZE: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program < rows:
        its_slot, length = tl.load(slots + program).to(tl.int64), tl.load(seq_lens + program)
        table, out = block_table + its_slot * table_stride, block_tables + program.to(tl.int64) * out_stride
        used = (length + SIZE - 1) // SIZE
        for first in range(0, used, BLOCK):
            at = first + tl.arange(0, BLOCK)
            tl.store(out + at, tl.load(table + at, mask=at < used), mask=at < used)
        if ends is not None:
            tl.store(ends + program, its_slot)
            tl.store(ends + rows + program, length.to(tl.int64))
            tl.store(ends + 2 * rows + program, (length - 1).to(tl.int64))
            last = tl.load(query_start + 1 + program) - tl.load(query_start) - 1
            tl.store(ends + 3 * rows + program, last.to(tl.int64))
    else:
        of = (program - rows) * TOKENS + tl.arange(0, TOKENS)
        token = tl.load(query_start) + of
        row = tl.zeros((TOKENS,), tl.int32)  # the number of rows that end before the token
        for start in range(0, rows, ROWS):
            some = start + tl.arange(0, ROWS)
            row_ends = tl.load(query_start + 1 + some, mask=some < rows, other=2147483647)
            row += tl.sum((row_ends[None, :] <= token[:, None]).to(tl.int32), axis=1)
        mask = (of < tokens) & (row < rows)
        end = tl.load(query_start + 1 + row, mask=mask, other=0)
        slot = tl.load(slots + row, mask=mask, other=0).to(tl.int64)
        position = tl.maximum(tl.load(seq_lens + row, mask=mask, other=0) - end + token, 0)
        block = tl.load(block_table + slot * table_stride + position // SIZE, mask=mask, other=0).to(tl.int64)
        tl.store(positions + of, position.to(tl.int64), mask=mask)
        tl.store(slot_mapping + of, block * SIZE + position % SIZE, mask=mask)


def prompt_inputs_triton(
    query_start: torch.Tensor, seq_lens: torch.Tensor, slots: torch.Tensor, block_table: torch.Tensor,
    positions: torch.Tensor, slot_mapping: torch.Tensor, block_tables: torch.Tensor, block_size: int,
    ends: torch.Tensor | None = None,
) -> None:  # fmt: skip
    rows, tokens = len(slots), len(positions)
    assert ends is None or ends.is_contiguous()
    _prompt_inputs_kernel[(rows + cdiv(tokens, _TOKENS),)](
        query_start, seq_lens, slots, block_table, block_table.stride(0), positions, slot_mapping, block_tables,
        block_tables.stride(0), ends, rows, tokens, SIZE=block_size, TOKENS=_TOKENS, ROWS=32, BLOCK=128, num_warps=4,
    )  # fmt: skip


def prompt_inputs_reference(
    query_start: torch.Tensor, seq_lens: torch.Tensor, slots: torch.Tensor, block_table: torch.Tensor,
    positions: torch.Tensor, slot_mapping: torch.Tensor, block_tables: torch.Tensor, block_size: int,
    ends: torch.Tensor | None = None,
) -> None:  # fmt: skip
    slots, row_ends = slots.long(), query_start[1:].contiguous()
    token = query_start[0] + torch.arange(len(positions), dtype=torch.int32, device=positions.device)
    row = torch.searchsorted(row_ends, token, right=True)
    position = ((seq_lens - row_ends)[row] + token).clamp_min(0)
    positions.copy_(position)
    slot_mapping.copy_(block_table[slots[row], position // block_size].long() * block_size + position % block_size)
    block_tables.copy_(block_table[slots, : block_tables.shape[1]])
    if ends is not None:
        ends.copy_(torch.stack([slots, seq_lens, seq_lens - 1, row_ends - query_start[0] - 1]))


def prompt_inputs(
    query_start: torch.Tensor, seq_lens: torch.Tensor, slots: torch.Tensor, block_table: torch.Tensor,
    positions: torch.Tensor, slot_mapping: torch.Tensor, block_tables: torch.Tensor, block_size: int,
    ends: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Fill what a step of n rows and t tokens reads; a row's tokens are the last ones of its ``seq_lens``.

    query_start (n + 1,) int32, starting at any number: its first and last differ by t; seq_lens (n,) int32; slots (n,)
    int32 or int64; block_table (S, max_blocks) int32. Written: positions and slot_mapping (t,) int64; block_tables (n,
    width) int32, of which only a context's blocks are defined; ends (4, n) int64, if given: each row's slot, length,
    and its last token's position in the sequence and index in the step. A row with more tokens than its length is
    padding: the excess tokens at its start get its first position.
    """
    run = prompt_inputs_triton if slots.is_cuda else prompt_inputs_reference
    run(query_start, seq_lens, slots, block_table, positions, slot_mapping, block_tables, block_size, ends)
