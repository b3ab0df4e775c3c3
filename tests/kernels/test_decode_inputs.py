"""The first kernel of a decode step against its reference, and against plain indexing."""

import pytest
import torch

from minivllm.kernels.decode_inputs import decode_inputs, decode_inputs_reference, decode_inputs_triton


def state(device, slots, max_blocks, block_size, longest):
    generator = torch.Generator().manual_seed(slots * 31 + max_blocks)
    last_token = torch.randint(0, 1000, (slots,), generator=generator)
    num_computed = torch.randint(0, longest, (slots,), generator=generator)
    table = torch.randperm(slots * max_blocks, generator=generator).int().reshape(slots, max_blocks) + 1
    return last_token.to(device), num_computed.to(device), table.to(device)


def outputs(device, rows, max_blocks):
    fill = -7
    return (
        torch.full((rows,), fill, dtype=torch.int64, device=device),
        torch.full((rows,), fill, dtype=torch.int64, device=device),
        torch.full((rows,), fill, dtype=torch.int32, device=device),
        torch.full((rows,), fill, dtype=torch.int64, device=device),
        torch.full((rows, max_blocks), fill, dtype=torch.int32, device=device),
    )


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize(("rows", "slots", "max_blocks"), [(1, 1, 1), (3, 8, 5), (16, 17, 130), (2, 4, 300)])
def test_decode_inputs_equal_their_reference(where, block_size, rows, slots, max_blocks):
    device, _ = where
    last_token, num_computed, table = state(device, slots, max_blocks, block_size, max_blocks * block_size)
    num_computed[0] = 0
    num_computed[-1] = max_blocks * block_size - 1  # the table's last entry
    order = torch.randperm(slots, generator=torch.Generator().manual_seed(rows))[:rows].to(device)
    got, want = outputs(device, rows, max_blocks), outputs(device, rows, max_blocks)
    behind = [torch.full((rows,), -7, device=device) for _ in range(2)]
    decode_inputs_triton(order, last_token, num_computed, table, *got, block_size, behind[0])
    decode_inputs_reference(order, last_token, num_computed, table, *want, block_size, behind[1])
    assert torch.equal(*behind) and torch.equal(behind[0], num_computed[order] + 1)
    for name, a, b in zip(("input_ids", "positions", "seq_lens", "slot_mapping"), got, want, strict=False):
        assert torch.equal(a, b), name
    for row, length in enumerate(want[2].tolist()):
        used = -(-length // block_size)
        assert torch.equal(got[4][row, :used], want[4][row, :used])
        assert (got[4][row, used:] == -7).all(), "wrote past the context's blocks"


def test_the_reference_is_plain_indexing():
    last_token, num_computed, table = state("cpu", 6, 4, 4, 16)
    slots = torch.tensor([4, 0, 2])
    out = outputs("cpu", 3, 4)
    after = torch.empty(3, dtype=torch.int64)
    decode_inputs(slots, last_token, num_computed, table, *out, 4, after)
    assert torch.equal(after, out[1] + 1)
    for row, slot in enumerate(slots.tolist()):
        position = int(num_computed[slot])
        assert out[0][row] == last_token[slot] and out[1][row] == position and out[2][row] == position + 1
        assert out[3][row] == int(table[slot, position // 4]) * 4 + position % 4
        assert out[4][row].tolist() == table[slot].tolist()


def test_a_padding_row_writes_into_block_0(where):
    """A graph's padding rows name the padding slot, whose table is all zeros."""
    device, _ = where
    last_token, num_computed, table = state(device, 3, 4, 4, 16)
    table[2], num_computed[2] = 0, 0
    out = outputs(device, 2, 4)
    after = torch.empty(2, dtype=torch.int64, device=device)
    decode_inputs_triton(torch.tensor([0, 2], device=device), last_token, num_computed, table, *out, 4, after)
    assert out[3][1] == 0 and out[2][1] == 1 and out[4][1, 0] == 0
