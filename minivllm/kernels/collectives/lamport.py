"""Words that are their own flag: what the kernels that sum over GPUs send into each other's memory.

As in NCCL's LL protocol the data is the flag; as in TensorRT-LLM's "Lamport" all-reduce an inbox is filled with a value
that is never sent. No separate flags, no fences. Words (4 bytes, aligned) arrive whole.

An inbox has three thirds that calls use in turn: call n uses third n % 3 and clears the one that call n - 1 used. That
is safe if in every call each rank waits, directly or indirectly, for words of all others:
1. Nobody else uses what is cleared: our kernel n - 1 is complete, so it has seen every word that peers sent there.
2. Peers write there again in their call n + 2, which they begin when their call n + 1 is complete. That one waited for
   our words of call n + 1, and we sent those after our kernel n, which cleared, was complete.
3. A word read in call n cannot be from call n + 3: by 2, a peer sends that one when our call n is complete.
A program that sends everything before it waits, and waits only for programs with its own number, does not need the
others to be resident: of the programs started in order on every rank, the lowest unfinished one can always proceed.

Calls are counted on the device, so a captured graph may be replayed at any time, between any other calls; all ranks
must make the same ones. ``calls`` (programs, 2) int64, the rank's own: for each program the number of calls, and the
last call's size in units of 16 bytes.
"""

# In a Triton kernel, tuples grow by + only.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

from minivllm.kernels._triton import tl, triton

# Two bfloat16 or float16 of -0.0, or one float32 of -4.6e-41. Zero is sent instead: sums start from 0.0, so for 16 bits
# the result is the same.
EMPTY = 0x80008000 - (1 << 32)
_EMPTY = tl.constexpr(EMPTY)


@triton.jit
def memory_of_all(table, RANKS: tl.constexpr):
    """Pointers to each rank's words. table: (RANKS,) int64, addresses."""
    found = ()
    for rank in tl.static_range(RANKS):
        found = found + (tl.multiple_of(tl.load(table + rank).to(tl.pointer_type(tl.int32)), 16),)
    return found


@triton.jit
def to_send(words):
    return tl.where(words == _EMPTY, 0, words)


@triton.jit
def arrived(words, places, mask):
    """Poll ``places`` until no word is empty. words: what was already loaded from there."""
    while tl.max((words == _EMPTY).to(tl.int32), 0) > 0:
        words = tl.load(places, mask=mask, other=0, volatile=True)
    return words


@triton.jit
def sum_of_all(own, inbox, stride, mask, RANK: tl.constexpr, RANKS: tl.constexpr, TYPE: tl.constexpr):
    """The sum of the ranks' words, in rank order, as ``floats`` of TYPE: our ``own``, and the others' once they are in
    the ``inbox``, ``stride`` words apart."""
    parts = ()
    for peer in tl.static_range(RANKS):  # all in flight at once
        if peer == RANK:
            parts = parts + (own,)
        else:
            parts = parts + (tl.load(inbox + peer * stride, mask=mask, other=0, volatile=True),)
    total = floats(tl.zeros(own.shape, tl.int32), TYPE)
    for peer in tl.static_range(RANKS):
        if peer == RANK:
            total = plus(total, floats(own, TYPE))
        else:
            total = plus(total, floats(arrived(parts[peer], inbox + peer * stride, mask), TYPE))
    return total


@triton.jit
def empty(places, mask):
    tl.store(places, tl.full(places.shape, _EMPTY, tl.int32), mask=mask)


@triton.jit
def count_call(calls, pid, programs, call, n4, ROWS: tl.constexpr):
    """Record that this was call ``call``, of ``n4`` times 16 bytes. A program reads its own row, and no other program
    of this call writes it: they also count for those beyond the grid."""
    tl.debug_barrier()  # all threads have read it
    row = tl.arange(0, ROWS)
    tl.store(calls + 2 * row, call + 1, mask=row % programs == pid)
    tl.store(calls + 2 * row + 1, n4, mask=row % programs == pid)


@triton.jit
def floats(words, TYPE: tl.constexpr):
    """The float32 values in words of TYPE: one tensor, or two of the low and high halves."""
    if TYPE.primitive_bitwidth == 32:
        return (words.to(tl.float32, bitcast=True),)
    else:
        low, high = words.to(tl.int16), (words >> 16).to(tl.int16)
        return (low.to(TYPE, bitcast=True).to(tl.float32), high.to(TYPE, bitcast=True).to(tl.float32))


@triton.jit
def rounded(values, TYPE: tl.constexpr):
    """The inverse of ``floats``, rounded to TYPE."""
    if TYPE.primitive_bitwidth == 32:
        return values[0].to(tl.int32, bitcast=True)
    else:
        low, high = values[0].to(TYPE).to(tl.int16, bitcast=True), values[1].to(TYPE).to(tl.int16, bitcast=True)
        return (high.to(tl.int32) << 16) | (low.to(tl.int32) & 0xFFFF)


@triton.jit
def plus(a, b):
    total = ()
    for i in tl.static_range(len(a)):
        total = total + (a[i] + b[i],)
    return total
