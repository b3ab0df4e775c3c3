"""All layers of a decoder in one Hopper kernel, for the next token of up to eight sequences. A step then takes little
more than reading its weights, 0.26 ms for Qwen3-0.6B.

As separate kernels each layer is four products and an attention, each of which has to fill the chip again: 21 µs per
layer of Qwen3-0.6B, whose weights take 7. Here every program (thread block) stays on its SM. While it waits for the
other programs' part of the current product, it prefetches its lines (weight rows) of the next ones: 200 KB per program,
most of a layer of that model, and the first of the next product in registers. Programs exchange vectors as words that
hold data and a flag, like NCCL's low-latency protocol, so there is no grid barrier and no fence. A layer's critical
path is five such trips through L2, about 1 µs each, and the arithmetic between them.

Weights may be packed (``mega_packed.cuh``): a quarter less to read, which pays in layers of some size. Or they are
float8, for up to two sequences: then each program converts its copy of every input (``mega_float8.cuh``), and products
are of float8.

MLPs may be mixtures of experts (``mega_experts.cuh``): router logits are exchanged like all else, a sixth trip, and the
experts' weights cannot be loaded before.

Several GPUs (``ranks``), each with a part of heads and MLP, all-reduce twice a layer through words in each other's
memory (``peer_words.py``), about 1.5 µs each, while their next weights arrive.

Bytes moved: the weights and the context's keys and values once. From L2 each program reads every vector whole: per
layer and row of Qwen3-0.6B 20 KB, and 8 KB of attention for each part, if a row has at most two. More parts are first
combined, each program a few words: one more trip. More than eight rows would gain little (measured). The kernel is CUDA
C++ (``megakernel.cu``). All programs must run at once, as in ``chain_linear``: launch them on one stream. Idea: Hazy
Research's megakernel for Llama-1B (2025).
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch.nn import functional as F

from minivllm.kernels import nvrtc
from minivllm.kernels._triton import LOG2E, compiling, next_power_of_2, num_sms
from minivllm.kernels.attention.cache_write import rounded_for
from minivllm.kernels.collectives.peer_words import MOST_ROWS, PeerWords
from minivllm.kernels.hopper import FIXED_BYTES, SHARED_BYTES, Kernel, launch_kernel, load, loads
from minivllm.kernels.linear.chain_config import ChainShape
from minivllm.kernels.linear.fp8_linear import quantize_reference
from minivllm.kernels.linear.packed_weights import FIRST_EXPONENT, PIECE_BYTES, STEP, Order, PackedWeight
from minivllm.kernels.pdl import use_pdl
from minivllm.rounding import cdiv, round_up

PAGE = 16  # keys
_WARPS, _LEAST_SPLITS, _MOST_SPLITS = 8, 8, 16  # compute warps; programs that may share a key head's attention
_MAX_GROUP = 8  # query heads per key head: columns of an MMA tile
MAX_MEGAKERNEL_ROWS = MOST_ROWS
_MOST_ROUTED_ROWS = 4  # more rows share experts, which the kernel reads once per row
_MOST_FLOAT8_ROWS = 2  # each row is kept twice, as bfloat16 and as float8
_LEAST_STAGES, _MOST_STAGES, _MANY_ROWS_STAGES = 4, 64, 8  # with 8 rows fewer stages are untested in an engine
_MOST_PIECES = 4  # each is waited for
_COPIES = 4  # of what all programs read, so that fewer poll one word
# (weights of a layer, at least; rows for which packed weights are then faster than any other way). In smaller layers
# latency between products dominates, and inputs of more rows leave too little room for weights. packed_chain reads
# Order.UNITS, too.
_PACKED_ROWS = {
    Order.UNITS: ((1 << 28, range(1, 3)), (150_000_000, range(1, 5)), (100_000_000, range(1, 3))),
    Order.LINES: ((1 << 28, range(1, 3)), (45_000_000, range(1, 9))),
}


@dataclass(frozen=True, slots=True)
class Routing:
    """An MoE MLP's routing: the ``top_k`` experts with the largest logits (rounded to bfloat16; the first among equal
    ones), weighted by the softmax over all logits, or, if ``renormalize``, over those ``top_k``."""

    experts: int
    top_k: int
    renormalize: bool


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """All layers of a decoder, or one rank's part: ``hidden`` is the full size, all else the rank's own."""

    hidden: int
    inner: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    routing: Routing | None = None  # if given, ``inner`` is an expert's
    ranks: int = 1  # that an all-reduce sums over
    biased: bool = False  # whether qkv has a bias
    float8: bool = False  # whether weights are float8_e4m3fn
    float8_cache: bool = False  # whether keys and values are

    @property
    def chosen(self) -> int:
        """MLPs that a token goes through."""
        return self.routing.top_k if self.routing else 1

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def qkv(self) -> int:
        return self.width + 2 * self.num_kv_heads * self.head_dim

    @property
    def products(self) -> ChainShape:
        """The products of a layer, with one expert if there are several."""
        return ChainShape(self.hidden, self.width, self.inner, self.qkv)


@dataclass(frozen=True, slots=True)
class MegakernelConfig:
    rows: int  # sequences, at most
    programs: int
    splits: int  # per key head's attention, at most, for all sequences together
    chunks: tuple[int, int, int]  # elements of k of hidden, width, inner per stage (which has eight lines)
    stages: int
    stage_bytes: int
    memory_bytes: int  # shared memory besides the stages
    pieces: int  # in which down's input is read
    under_way: int  # bytes of weights in flight per program, at most, see _under_way
    packed: Order | None  # of weights

    @property
    def shared_bytes(self) -> int:
        return self.memory_bytes + self.stages * self.stage_bytes + 1024


@cache
def megakernel_config(
    shape: DecoderShape, rows: int = 1, sms: int = 132, packed: Order | None = None
) -> MegakernelConfig | None:
    """None if the products cannot be split evenly, the kernel does not support such heads, or there are too many rows.
    ``packed``: the order of packed weights, if they are."""
    routing, chosen = shape.routing, shape.chosen
    if rows > (_MOST_ROUTED_ROWS if routing else _MOST_FLOAT8_ROWS if shape.float8 else MAX_MEGAKERNEL_ROWS):
        return None
    rows = next_power_of_2(rows)
    group, rest = divmod(shape.num_heads, shape.num_kv_heads)
    if rest or group > _MAX_GROUP or shape.head_dim not in ((128,) if shape.float8_cache else (64, 128)):
        return None
    lines = shape.hidden, shape.inner, shape.qkv
    even = range(sms // 8 * 8, sms * 9 // 10, -8)
    programs = next((p for p in even if not any(n % (2 * p) for n in lines)), None)  # outputs are written in pairs
    if programs is None or programs < shape.num_kv_heads * _LEAST_SPLITS:
        return None
    if routing and (
        shape.ranks > 1 or routing.experts % programs or routing.experts % 32 or chosen > min(32, routing.experts)
    ):
        return None
    if rows * shape.hidden // programs > 32 * _WARPS or rows * shape.width < 4 * 32 * _WARPS:
        return None
    ks = shape.hidden, shape.width, shape.inner
    if shape.float8 and (routing or packed):
        return None
    if packed and (routing or any(n // programs % 4 for n in lines) or any(k % STEP for k in ks)):
        return None
    width = 1 if shape.float8 else 2  # bytes of an element
    if packed:
        ways = [[_WARPS * STEP] * 3]
    else:
        ways = [[_chunk(k, width, whole) for k in ks] for whole in (False, True) if whole or not routing]
    cuts = (_cut(shape, rows, programs, packed, chunks) for chunks in ways if all(chunks))
    return next((cut for cut in cuts if cut is not None), None)


def _cut(
    shape: DecoderShape, rows: int, programs: int, packed: Order | None, chunks: list[int]
) -> MegakernelConfig | None:
    """With such stages; None: there is no room for enough of them."""
    hidden, attended, inner = chunks
    width, group = 1 if shape.float8 else 2, shape.num_heads // shape.num_kv_heads
    of_experts = (shape.inner * shape.chosen, shape.qkv, shape.hidden)
    gate_lines, *others = (round_up(cdiv(n, programs), 8) for n in of_experts)
    most_lines = max(2 * gate_lines, *others)
    page_bytes = (2 if shape.float8_cache else 4) * PAGE * shape.head_dim  # of one head; a stage has one or two pages
    weight_bytes = _WARPS * PIECE_BYTES if packed else 8 * (width * max(chunks) + 64)
    stage_bytes = round_up(max(weight_bytes, page_bytes), 1024)
    enough = _MANY_ROWS_STAGES if rows > 4 else _LEAST_STAGES
    for pieces in range(1, 2 if shape.routing or shape.float8 else _MOST_PIECES + 1):
        if shape.inner % (pieces * (STEP if packed else inner // _WARPS if pieces == 1 else inner)):
            continue
        most_k = max(shape.hidden, shape.width, shape.chosen * shape.inner // pieces)
        x_bytes = rows * (width * most_k + (64 if rows > 1 else 0))
        memory = max(x_bytes, 4 * _WARPS * group * shape.head_dim)  # see Memory of the kernel
        memory += 4 * _WARPS + 4 * rows + (2 * (rows * most_k + shape.hidden) if shape.float8 else 32)
        memory += 4 * _WARPS * (rows * most_lines + 2 * 8 + 1) + (group + 2) * (2 * shape.head_dim + 16)
        memory += 4 * shape.head_dim + 16 * _MOST_STAGES + 128 + (8 * rows * shape.chosen if shape.routing else 0)
        scaled = packed or shape.float8
        memory += 4 * sum((shape.qkv, 2 * shape.hidden, 2 * shape.inner)) // programs if scaled else 4
        memory = round_up(memory, 1024)
        stages = min((SHARED_BYTES - FIXED_BYTES - memory) // stage_bytes, _MOST_STAGES)
        if stages >= enough:
            break
    else:
        return None
    splits, under_way = min(programs // shape.num_kv_heads, _MOST_SPLITS), _under_way(shape, rows)
    sizes = (hidden, attended, inner)
    return MegakernelConfig(rows, programs, splits, sizes, stages, stage_bytes, memory, pieces, under_way, packed)


def _under_way(shape: DecoderShape, rows: int) -> int:
    """Three stages of 1,024 or 1,280 elements, or two where a layer waits for words rather than weights. If all free
    stages were in flight, programs would run at different paces and bandwidth would drop by 5 to 10%; not with
    experts."""
    if shape.routing:
        return SHARED_BYTES
    return (60 if shape.products.weights > (32 << 20 if rows <= 4 else 64 << 20) else 40) << 10


def _chunk(k: int, width: int, whole: bool) -> int:
    """Elements, of ``width`` bytes, of k in a stage; 0 if there is no way. Issuing a load takes as long as memory takes
    for 1 KB, so that longer ones are better, even if k ends within the last stage (unless stages must be ``whole``)."""
    nbytes = k * width
    lengths = [length for length in (2048, 2560, 1536) if nbytes % length == 0]
    lengths += [2048] if nbytes > 2048 and not whole else []
    lengths += [length for length in (1024, 512) if nbytes % length == 0]
    lengths += [] if whole else [1024, 512]
    return next((length for length in lengths if nbytes % (length // _WARPS) == 0), 0) // width


@cache
def megakernel_of(shape: DecoderShape, config: MegakernelConfig) -> Kernel:
    macros = {"ROWS": config.rows, "PROGRAMS": config.programs, "HIDDEN": shape.hidden, "INNER": shape.inner,
              "KV": shape.num_kv_heads, "G": shape.num_heads // shape.num_kv_heads, "D": shape.head_dim,
              "STAGES": config.stages, "STAGE_BYTES": config.stage_bytes,
              "SPLITS": config.splits, "COPIES": _COPIES, "PIECES": config.pieces,
              "MEMORY_BYTES": config.memory_bytes, "CHOSEN": shape.chosen, "UNDER_WAY": config.under_way,
              "RANKS": shape.ranks, "PACKED": int(config.packed is not None),
              "BIASED": int(shape.biased), "FLOAT8": int(shape.float8),
              "FLOAT8_CACHE": int(shape.float8_cache)}  # fmt: skip
    macros |= zip(("HIDDEN_CHUNK", "WIDTH_CHUNK", "INNER_CHUNK"), config.chunks, strict=True)
    routing = shape.routing
    macros["EXPERTS"] = routing.experts if routing else 0
    if routing:
        macros["RENORMALIZE"] = int(routing.renormalize)
    if config.packed:
        macros |= {"PIECE_BYTES": PIECE_BYTES, "FIRST_EXPONENT": FIRST_EXPONENT}
        macros["BY_LINES"] = int(config.packed is Order.LINES)
    weights = ("packed_piece", "mega_packed") if config.packed else ("mega_lines",)
    mlp = "mega_experts" if routing else "mega_dense"
    files = "mega_words", *weights, "mega_float8", "mega_products", "mega_attention", mlp
    return Kernel("megakernel", (), tuple(macros.items()), files)


def packed_megakernel_rows(shape: DecoderShape, order: Order) -> range:
    """Rows for which packed weights in that order are faster than any other way; none for small layers."""
    if shape.routing is not None or shape.float8:
        return range(0)
    return next((rows for weights, rows in _PACKED_ROWS[order] if shape.products.weights >= weights), range(0))


def use_megakernel(
    shape: DecoderShape, rows: int, dtype: torch.dtype, device: torch.device, packed: Order | None = None
) -> bool:
    """Whether the kernel supports such layers, with ``packed`` weights or not, for so many sequences on that device."""
    if dtype != torch.bfloat16 or not nvrtc.available(device):
        return False
    config = megakernel_config(shape, rows, num_sms(device), packed)
    if config is None or not loads(megakernel_of(shape, config), device):
        return False
    return compiling() or _fits(shape, config, device)


@cache
def _fits(shape: DecoderShape, config: MegakernelConfig, device: torch.device) -> bool:
    """Whether all programs, which wait for each other, can run at once on the device."""
    with torch.cuda.device(device):
        kernel = load(megakernel_of(shape, config), device)
        return config.programs <= nvrtc.programs_at_once(kernel, _launch_shape(config, False), num_sms(device))


@cache
def _launch_shape(config: MegakernelConfig, pdl: bool) -> nvrtc.LaunchShape:
    return nvrtc.LaunchShape((config.programs, 1, 1), (1, 1, 1), 32 * (_WARPS + 1), config.shared_bytes, pdl)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer's weights and cache. Norms are folded into ``qkv`` (qkv, hidden) and ``gate_up`` (2 * inner, hidden); o
    (hidden, width), down (hidden, inner); q_norm, k_norm (head_dim,) or None; keys and values (blocks, 16, kv heads,
    head_dim). All bfloat16 (keys and values float8_e4m3fn if the shape has a ``float8_cache``) and contiguous. With
    routing: gate_up (experts, 2 * inner, hidden), gate's rows first, down
    (experts, hidden, inner), router (experts, hidden), and the norm before them (hidden,), which is not folded in.
    ``packed``: packed copies of qkv, o, gate_up (as gated) and down, which the kernel reads instead; of all layers, in
    one order, or of none. qkv_bias (qkv,), if the shape is ``biased``. If it is ``float8``, qkv, o, gate_up and down
    are float8_e4m3fn and have ``scales``, one per line, float32, and neither ``input_norm`` nor ``norm`` (hidden,) is
    folded in."""

    qkv: torch.Tensor
    o: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    keys: torch.Tensor
    values: torch.Tensor
    router: torch.Tensor | None = None
    norm: torch.Tensor | None = None
    packed: tuple[PackedWeight, PackedWeight, PackedWeight, PackedWeight] | None = None
    qkv_bias: torch.Tensor | None = None
    input_norm: torch.Tensor | None = None
    scales: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def pointers(self) -> tuple[int, ...]:
        products: tuple[torch.Tensor | None, ...] = self.qkv, self.o, self.gate_up, self.down
        scales: tuple[torch.Tensor | None, ...] = self.scales or (None,) * 4
        if self.packed is not None:
            products, scales = zip(*((its.data, its.scales) for its in self.packed), strict=True)
        others = self.q_norm, self.k_norm, self.keys, self.values, self.router, self.norm
        tensors = *products, *others, *scales, self.qkv_bias, self.input_norm
        assert all(t is None or (t.is_contiguous() and t.data_ptr() % 16 == 0) for t in tensors)
        return tuple(0 if t is None else t.data_ptr() for t in tensors)


@dataclass(frozen=True, slots=True)
class Layers:
    """What all steps share. cos_sin (positions, head_dim) float32; ``eps``: of the norms before products,
    ``heads_eps``: of those of heads. ``peers``: where other ranks, if there are any, write their parts."""

    shape: DecoderShape
    weights: list[LayerWeights]
    cos_sin: torch.Tensor
    scale: float
    eps: float
    heads_eps: float
    peers: PeerWords | None = None


@dataclass(frozen=True, slots=True)
class DecodeTokens:
    """One token per sequence; padding rows, with slots in page 0, may follow. positions, slots (rows,) int64; seq_lens
    (rows,) int32, this token included; block_tables (rows, …) int32."""

    positions: torch.Tensor
    slots: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor


@cache
def _table(device: torch.device, pointers: tuple[tuple[int, ...], ...]) -> torch.Tensor:
    """(layers, 16) int64 on the device: an array of ``Layer``, see mega_words.cuh."""
    return torch.tensor(pointers, dtype=torch.int64).to(device)


@cache
def _maps(device: torch.device, caches: tuple[int, ...], blocks: int, kv_heads: int, head_size: int) -> torch.Tensor:
    """(layers, 2, 128) uint8 on the device: tensor maps of each layer's keys and values, for one head of a page.
    ``head_size``: in elements of bfloat16, or pairs of float8."""
    maps = (nvrtc.page_map(pointer, blocks, PAGE, kv_heads * head_size, head_size) for pointer in caches)
    data = b"".join(map(_map_bytes, maps))
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def _map_bytes(made: nvrtc.TensorMap) -> bytes:
    return ctypes.string_at(made.address, 128)


@cache
def _words(device: torch.device, number: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(number,) int64: the words that a rank's programs exchange, zeros before the first launch; (1,) int32: layers so
    far."""
    return (
        torch.zeros(number, dtype=torch.int64, device=device),
        torch.zeros(1, dtype=torch.int32, device=device),
    )


def megakernel(x: torch.Tensor, layers: Layers, tokens: DecodeTokens) -> torch.Tensor:
    """The residual stream (rows, hidden) after all layers, for x (rows, hidden) before them; bfloat16, rounded after
    each product and each addition. Writes each layer's new keys and values to its cache. If a ``shape`` has several
    ranks, all of them must launch it, in the same order; all get the same bytes."""
    y = torch.empty_like(x)
    if compiling():
        return y
    shape, cos_sin, device = layers.shape, layers.cos_sin, x.device
    assert all((its.qkv_bias is not None) == shape.biased for its in layers.weights)
    packed = layers.weights[0].packed
    config = megakernel_config(shape, len(x), num_sms(device), packed[0].order if packed else None)
    assert config is not None and x.shape[1] == shape.hidden and x.is_contiguous()
    assert tokens.positions.dtype == tokens.slots.dtype == torch.int64 and cos_sin.shape[1] == shape.head_dim
    assert tokens.seq_lens.dtype == tokens.block_tables.dtype == torch.int32
    pointers_of = tuple(layer.pointers() for layer in layers.weights)
    table = _table(device, pointers_of)
    caches = tuple(cache.data_ptr() for layer in layers.weights for cache in (layer.keys, layer.values))
    keys = layers.weights[0].keys
    blocks, page = keys.shape[:2]
    assert page == PAGE and keys.itemsize == (1 if shape.float8_cache else 2)
    maps = _maps(device, caches, blocks, shape.num_kv_heads, shape.head_dim * keys.itemsize // 2)
    parts = config.splits * (shape.width // 2 + shape.num_heads)
    streams = shape.hidden + (shape.chosen * shape.inner + shape.width) // 2
    streams += shape.routing.experts if shape.routing else 0
    peers = layers.peers
    assert shape.ranks == (1 if peers is None else peers.ranks)
    number = config.rows * shape.qkv // 2 + _COPIES * (parts + config.rows * streams)
    words, count = _words(device, number, 0 if peers is None else peers.rank)
    if peers is not None:
        count = peers.layers
    step = (tokens.positions, tokens.slots, tokens.seq_lens, tokens.block_tables)
    tensors = table, maps, x, y, cos_sin, *step, words, count
    strides = (ctypes.c_longlong * 2)(cos_sin.stride(0), tokens.block_tables.stride(0))
    numbers = (ctypes.c_int * 3)(len(x), len(layers.weights), 0)
    factors = (ctypes.c_float * 3)(layers.eps, layers.heads_eps, layers.scale * LOG2E)
    everywhere = ctypes.c_void_p(0 if peers is None else peers.addresses.data_ptr())
    rank = ctypes.c_int(0 if peers is None else peers.rank)
    kernel, launch_shape = load(megakernel_of(shape, config), device), _launch_shape(config, use_pdl(device))
    launch_kernel(kernel, launch_shape, [], tensors, strides, numbers, factors, everywhere, rank)
    return y


def megakernel_reference(x: torch.Tensor, layers: Layers, tokens: DecodeTokens) -> torch.Tensor:
    """The same in float32, rounded to x's dtype where the kernel rounds."""

    def rounded(y: torch.Tensor) -> torch.Tensor:
        return y.to(x.dtype).float()

    def normed(y: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if weight is None:
            return y
        return rounded(rounded(F.rms_norm(y, y.shape[-1:], eps=layers.heads_eps)) * weight.float())

    def turned(y: torch.Tensor) -> torch.Tensor:
        first, second = y.chunk(2, dim=-1)
        return rounded(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))

    shape, stream = layers.shape, x.float()
    groups, dim = shape.num_kv_heads, shape.head_dim
    cos, sin = (half[:, None] for half in layers.cos_sin[tokens.positions].chunk(2, dim=-1))
    lengths = tokens.seq_lens.tolist()
    places = [
        table[(each := torch.arange(length, device=x.device)) // PAGE].long() * PAGE + each % PAGE
        for table, length in zip(tokens.block_tables, lengths, strict=True)
    ]
    for layer in layers.weights:
        projection = _product(stream, layer, 0, layers.eps)
        if layer.qkv_bias is not None:
            projection += layer.qkv_bias.float()
        heads = rounded(projection).view(len(x), -1, dim)
        q, k, v = heads.split((shape.num_heads, groups, groups), dim=1)
        stored = layer.keys.view(-1, groups, dim), layer.values.view(-1, groups, dim)
        for kept, new in zip(stored, (turned(normed(k, layer.k_norm)), v), strict=True):
            kept[tokens.slots] = rounded_for(new, kept.dtype)
        q = turned(normed(q, layer.q_norm)).view(len(x), groups, -1, dim)
        out = []
        for queries, its_places in zip(q, places, strict=True):
            keys, values = (kept[its_places].float() for kept in stored)
            weights = (torch.einsum("hgd,nhd->hgn", queries, keys) * layers.scale).softmax(dim=-1)
            out.append(rounded(torch.einsum("hgn,nhd->hgd", weights, values)).view(-1))
        stream = rounded(stream + _product(torch.stack(out), layer, 1))
        if shape.routing is None:
            gate, up = _product(stream, layer, 2, layers.eps).chunk(2, dim=1)
            stream = rounded(stream + _product(rounded(F.silu(gate) * up), layer, 3))
        else:
            assert layer.norm is not None
            factors = (stream.square().mean(dim=1, keepdim=True) + layers.eps).rsqrt()
            normed_stream = rounded(stream * layer.norm.float()) * factors
            stream = rounded(stream + _routed(normed_stream, layer, shape.routing, rounded))
    return stream.to(x.dtype)


def _product(x: torch.Tensor, layer: LayerWeights, i: int, eps: float | None = None) -> torch.Tensor:
    """The layer's ``i``-th product, of x or, if ``eps`` is given, of its norm; float32."""
    weight = (layer.qkv, layer.o, layer.gate_up, layer.down)[i].float()
    if layer.scales is None:
        return (x if eps is None else F.rms_norm(x, x.shape[-1:], eps=eps)) @ weight.T
    rows = quantize_reference(x, None if eps is None else layer.norm if i else layer.input_norm, eps or 0.0)
    return rows.values.float() @ weight.T * rows.scales[:, None] * layer.scales[i]


def _routed(
    x: torch.Tensor, layer: LayerWeights, routing: Routing, rounded: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """The MoE MLP of x (rows, hidden), which is already normed."""
    assert layer.router is not None
    logits = rounded(x @ layer.router.float().T)
    chosen = logits.argsort(dim=1, descending=True, stable=True)[:, : routing.top_k]
    shares = (logits.gather(1, chosen) if routing.renormalize else logits).softmax(dim=1)
    shares = shares if routing.renormalize else shares.gather(1, chosen)
    out = torch.zeros_like(x)
    for row, (experts, its_shares) in enumerate(zip(chosen.tolist(), shares, strict=True)):
        for expert, share in zip(experts, its_shares, strict=True):
            gate, up = (layer.gate_up[expert].float() @ x[row]).chunk(2)
            out[row] += layer.down[expert].float() @ rounded(F.silu(gate) * up * share)
    return out
