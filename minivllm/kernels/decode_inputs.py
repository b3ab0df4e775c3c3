"""The first kernel of a captured decode step: from the batch's slots to everything that the model reads.

One program a row: the slot's last token and position, its context length, the cache place of the new token, and its
block-table row. Bytes: 8 a block of context, so 256 rows of 64 blocks are 131 KB: launch-bound, 2-3 µs.
"""

import torch

from minivllm.kernels._triton import tl, triton


@triton.jit(do_not_specialize=["table_stride", "out_stride"])
def _decode_inputs_kernel(
    slots, last_token, num_computed, block_table, table_stride,
    input_ids, positions, seq_lens, slot_mapping, block_tables, out_stride,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    position = tl.load(num_computed + slot)
    tl.store(input_ids + row, tl.load(last_token + slot))
    tl.store(positions + row, position)
    tl.store(seq_lens + row, (position + 1).to(tl.int32))
    table = block_table + slot * table_stride
    block = tl.load(table + position // SIZE).to(tl.int64)
    tl.store(slot_mapping + row, block * SIZE + position % SIZE)
    used = position // SIZE + 1
    for first in range(0, used, BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(block_tables + row * out_stride + at, tl.load(table + at, mask=at < used), mask=at < used)


def decode_inputs_triton(
    slots: torch.Tensor, last_token: torch.Tensor, num_computed: torch.Tensor, block_table: torch.Tensor,
    input_ids: torch.Tensor, positions: torch.Tensor, seq_lens: torch.Tensor, slot_mapping: torch.Tensor,
    block_tables: torch.Tensor, block_size: int,
) -> None:  # fmt: skip
    _decode_inputs_kernel[(len(slots),)](
        slots, last_token, num_computed, block_table, block_table.stride(0), input_ids, positions, seq_lens,
        slot_mapping, block_tables, block_tables.stride(0), SIZE=block_size, BLOCK=128, num_warps=1,
    )  # fmt: skip


def decode_inputs_reference(
    slots: torch.Tensor, last_token: torch.Tensor, num_computed: torch.Tensor, block_table: torch.Tensor,
    input_ids: torch.Tensor, positions: torch.Tensor, seq_lens: torch.Tensor, slot_mapping: torch.Tensor,
    block_tables: torch.Tensor, block_size: int,
) -> None:  # fmt: skip
    position = num_computed[slots]
    input_ids.copy_(last_token[slots])
    positions.copy_(position)
    seq_lens.copy_(position + 1)
    slot_mapping.copy_(block_table[slots, position // block_size].long() * block_size + position % block_size)
    block_tables.copy_(block_table[slots])


def decode_inputs(
    slots: torch.Tensor, last_token: torch.Tensor, num_computed: torch.Tensor, block_table: torch.Tensor,
    input_ids: torch.Tensor, positions: torch.Tensor, seq_lens: torch.Tensor, slot_mapping: torch.Tensor,
    block_tables: torch.Tensor, block_size: int,
) -> None:  # fmt: skip
    """Fill what a decode step of n rows reads; each slot's newest token stands at ``num_computed``.

    slots (n,) int64; last_token, num_computed (S,) int64; block_table (S, max_blocks) int32. Written: input_ids,
    positions, slot_mapping (n,) int64; seq_lens (n,) int32; block_tables (n, max_blocks) int32, of which only a
    context's blocks are defined.
    """
    run = decode_inputs_triton if slots.is_cuda else decode_inputs_reference
    run(
        slots, last_token, num_computed, block_table, input_ids, positions, seq_lens, slot_mapping, block_tables,
        block_size,
    )  # fmt: skip
