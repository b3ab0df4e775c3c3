"""The first and the last kernel of a captured decode step: from the batch's slots to all that the model reads, and from
the sampled tokens back to the slots and to the host.

The first has one program per row: the slot's last token and position, context length, the new token's place in the
cache, and the block-table row. Bytes: 8 per block of context, so 256 rows of 64 blocks are 131 KB: launch-bound, 2-3
µs. So is the last: 24 bytes per row read and 24 written, 8 of these to host memory, because a separate copy would keep
the device waiting between two steps.
"""

import torch

from minivllm.kernels._triton import tl, triton
from minivllm.kernels.pdl import use_pdl


@triton.jit(do_not_specialize=["table_stride", "out_stride"])
def _decode_inputs_kernel(
    slots, last_token, num_computed, block_table, table_stride,
    input_ids, positions, seq_lens, slot_mapping, block_tables, out_stride, after,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    position = tl.load(num_computed + slot)
    tl.store(input_ids + row, tl.load(last_token + slot))
    tl.store(positions + row, position)
    tl.store(seq_lens + row, (position + 1).to(tl.int32))
    tl.store(after + row, position + 1)
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
    block_tables: torch.Tensor, block_size: int, after: torch.Tensor,
) -> None:  # fmt: skip
    pdl = use_pdl(slots.device)
    _decode_inputs_kernel[(len(slots),)](
        slots, last_token, num_computed, block_table, block_table.stride(0), input_ids, positions, seq_lens,
        slot_mapping, block_tables, block_tables.stride(0), after, SIZE=block_size, BLOCK=128, PDL=pdl, num_warps=1,
        launch_pdl=pdl,
    )  # fmt: skip


def decode_inputs_reference(
    slots: torch.Tensor, last_token: torch.Tensor, num_computed: torch.Tensor, block_table: torch.Tensor,
    input_ids: torch.Tensor, positions: torch.Tensor, seq_lens: torch.Tensor, slot_mapping: torch.Tensor,
    block_tables: torch.Tensor, block_size: int, after: torch.Tensor,
) -> None:  # fmt: skip
    position = num_computed[slots]
    input_ids.copy_(last_token[slots])
    positions.copy_(position)
    seq_lens.copy_(position + 1)
    slot_mapping.copy_(block_table[slots, position // block_size].long() * block_size + position % block_size)
    block_tables.copy_(block_table[slots])
    after.copy_(position + 1)


def decode_inputs(
    slots: torch.Tensor, last_token: torch.Tensor, num_computed: torch.Tensor, block_table: torch.Tensor,
    input_ids: torch.Tensor, positions: torch.Tensor, seq_lens: torch.Tensor, slot_mapping: torch.Tensor,
    block_tables: torch.Tensor, block_size: int, after: torch.Tensor,
) -> None:  # fmt: skip
    """Fill what a decode step of n rows reads; each slot's newest token is at position ``num_computed``.

    slots (n,) int64; last_token, num_computed (S,) int64; block_table (S, max_blocks) int32. Written: input_ids,
    positions, slot_mapping (n,) int64; seq_lens (n,) int32; block_tables (n, max_blocks) int32, of which only a
    context's blocks are defined; after (n,) int64, the position of the token that the step samples.
    """
    run = decode_inputs_triton if slots.is_cuda else decode_inputs_reference
    run(
        slots, last_token, num_computed, block_table, input_ids, positions, seq_lens, slot_mapping, block_tables,
        block_size, after,
    )  # fmt: skip


@triton.jit(do_not_specialize=["landing_stride", "n", "padding"])
def _finish_decode_kernel(
    tokens, slots, positions, last_token, num_computed, steps, landing, landing_stride, n, padding,
    RING: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program: the step may be counted only after all programs have read the count.
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    step = tl.load(steps) + 1
    landing += step % RING * landing_stride
    for first in range(0, n, BLOCK):
        row = first + tl.arange(0, BLOCK)
        mask = row < n
        slot = tl.load(slots + row, mask=mask, other=0)
        token = tl.load(tokens + row, mask=mask, other=0)
        position = tl.load(positions + row, mask=mask, other=0)
        tl.store(landing + 1 + row, token, mask=mask)
        tl.store(last_token + slot, token, mask=mask)
        tl.store(num_computed + slot, tl.where(slot == padding, 0, position + 1), mask=mask)
    tl.debug_barrier()  # all threads have read the count
    tl.store(landing, step)
    tl.store(steps, step)


def finish_decode_triton(
    tokens: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, last_token: torch.Tensor,
    num_computed: torch.Tensor, steps: torch.Tensor, landing: torch.Tensor, padding: int,
) -> None:  # fmt: skip
    pdl = use_pdl(slots.device)
    _finish_decode_kernel[(1,)](
        tokens, slots, positions, last_token, num_computed, steps, landing, landing.stride(0), len(slots), padding,
        RING=len(landing), BLOCK=512, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


def finish_decode_reference(
    tokens: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, last_token: torch.Tensor,
    num_computed: torch.Tensor, steps: torch.Tensor, landing: torch.Tensor, padding: int,
) -> None:  # fmt: skip
    last_token[slots] = tokens
    num_computed[slots] = torch.where(slots == padding, 0, positions + 1)
    steps += 1
    step = int(steps)
    landing[step % len(landing), 0] = step
    landing[step % len(landing), 1 : len(tokens) + 1] = tokens.to(landing.device)


def finish_decode(
    tokens: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, last_token: torch.Tensor,
    num_computed: torch.Tensor, steps: torch.Tensor, landing: torch.Tensor, padding: int,
) -> None:  # fmt: skip
    """Put what a decode step of n rows sampled where the next step and the host read it.

    tokens, slots, positions (n,) int64: positions are those that the step computed. Written: last_token and
    num_computed (S,) int64 at the rows' slots (the padding slot's count stays 0); steps (1,) int64, incremented; and
    row ``steps % ring`` of landing (ring, 1 + n or more) int64: the new count, then the tokens. ``landing`` is pinned
    host memory: Triton cannot access any other.
    """
    run = finish_decode_triton if slots.is_cuda else finish_decode_reference
    run(tokens, slots, positions, last_token, num_computed, steps, landing, padding)
