"""Words that are their own flag: what the kernels that sum over GPUs send into each other's memory.

As in NCCL's LL protocol data is its own flag, and as in TensorRT-LLM's "Lamport" all-reduce an inbox is full of what is
never sent. No flags, no fences. Words, aligned 4 bytes, arrive whole.

An inbox has three thirds that calls take by turns: call n uses third n % 3 and clears what call n - 1 used. That is
enough where in every call each rank waits, itself or through what it waits for, for words of all others:
1. Nobody else is at what is cleared: our kernel n - 1 is complete, so it has seen every word that peers sent there.
2. Peers write there again in their call n + 2, which they begin when their call n + 1 is complete. That one had waited
   for our words of call n + 1, and we sent those when our kernel n, which cleared, was complete.
3. A word read in call n is none of call n + 3: by 2, a peer sends that one when our call n is complete.
A program that sends all that it can before it waits for any, and waits for the programs of its own number only, needs
no others beside it: of those begun in order on every rank, the lowest that is not done can always go on.

Calls are counted on the device, so a captured graph may be replayed at will, between any other calls; all ranks must
make the same ones. ``calls`` (programs, 2) int64, a rank's own: of each program how many calls there were, and the last
one's size in 16 bytes.
"""

# In a Triton kernel, tuples grow by + only.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

from minivllm.kernels._triton import tl, triton

# Two bfloat16 or float16 of -0.0, or one float32 of -4.6e-41. A zero is sent in its place: sums begin with 0.0, so for
# 16 bits the result is the same.
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
    """``words``, once none of them is empty: until then what is at ``places``, again and again."""
    while tl.max((words == _EMPTY).to(tl.int32), 0) > 0:
        words = tl.load(places, mask=mask, other=0, volatile=True)
    return words


@triton.jit
def sum_of_all(own, inbox, stride, mask, RANK: tl.constexpr, RANKS: tl.constexpr, TYPE: tl.constexpr):
    """The ranks' words added up, in their order, as ``floats`` of TYPE: our ``own``, and the others' once they are in
    the ``inbox``, each ``stride`` words behind the one before."""
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
    """This was call ``call``, of ``n4`` times 16 bytes. A program reads its own row, and no other of this call writes
    it: they count for those beyond the grid."""
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
