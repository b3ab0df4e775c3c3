"""``chain_linear`` with packed weights (``packed_weights.py``), for large layers and few rows, on Hopper.

Rows are wgmma's N, so they are padded to 8, not 64. Weights are M and come from registers, where two warpgroups decode
them: 1.4 instructions per weight, a third of what an SM has time for. Decoding into shared memory, for a kernel like
``large_chain.cu``, exceeds shared memory's bandwidth (measured).

The kernel is CUDA C++ (``packed_chain.cu``). All programs must run at once, one per SM, as in ``chain_linear``: launch
them on one stream.

Bytes moved: 12 bits per weight, once; from L2 to an SM the rows' k for each 256 lines (rows of the weight), and the
sums of blocks that are split along k, a float per element, written and read.
"""

import ctypes
from functools import cache
from itertools import chain

import torch

from minivllm.kernels import nvrtc
from minivllm.kernels._triton import compiling, num_sms
from minivllm.kernels.hopper import Kernel, launch_kernel, load
from minivllm.kernels.linear.chain_config import ChainShape
from minivllm.kernels.linear.packed_config import PackedConfig, packed_config
from minivllm.kernels.linear.packed_weights import Order, PackedWeight
from minivllm.kernels.pdl import use_pdl

# (weights of a layer, at least; rows). With fewer rows one kernel for all layers is faster; with more, traffic between
# programs dominates.
_ROWS = (190_000_000, range(1, 49)), (100_000_000, range(3, 33))


@cache
def packed_chain_config(rows: int, shape: ChainShape, sms: int) -> PackedConfig | None:
    sizes = (shape.hidden, shape.width), (2 * shape.inner, shape.hidden), (shape.hidden, shape.inner), (
        shape.qkv, shape.hidden)  # fmt: skip
    return packed_config(rows, sizes, sms)


@cache
def packed_kernel(shape: ChainShape, config: PackedConfig) -> Kernel:
    sizes = {"HIDDEN": shape.hidden, "WIDTH": shape.width, "INNER": shape.inner, "QKV": shape.qkv}
    return config.kernel("packed_chain", sizes)


def packed_rows(shape: ChainShape) -> range:
    """Rows for which packed weights are faster than any kernel for unpacked ones; none for small layers."""
    return next((rows for weights, rows in _ROWS if shape.weights >= weights), range(0))


def use_packed(rows: int, shape: ChainShape, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernel supports such products and runs on the device."""
    if dtype != torch.bfloat16 or not nvrtc.available(device):
        return False
    config = packed_chain_config(rows, shape, num_sms(device))
    return config is not None and config.runs(packed_kernel(shape, config), device)


@cache
def _counts(device: torch.device) -> torch.Tensor:
    """(4,) int32, zeros between launches."""
    return torch.zeros(4, dtype=torch.int32, device=device)


def packed_chain(
    heads: torch.Tensor,
    o: PackedWeight,
    x: torch.Tensor,
    gate_up: PackedWeight,
    eps: float,
    down: PackedWeight,
    qkv: PackedWeight,
    eps_behind: float,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """``chain_linear`` for a large layer: updates x (t, hidden) in place; returns (t, qkv) with ``bias`` (qkv,) added.
    ``gate_up`` must be packed as gated."""
    rows, device = x.shape[0], x.device
    shape = ChainShape(x.shape[1], heads.shape[1], down.weight.shape[1], qkv.weight.shape[0])
    config = packed_chain_config(rows, shape, num_sms(device))
    assert config is not None and x.is_contiguous() and heads.stride(1) == 1 and gate_up.gated
    assert all(its.order is Order.UNITS for its in (o, gate_up, down, qkv))
    projection = x.new_empty((rows, shape.qkv))
    if compiling():
        return projection
    hidden = x.new_empty((rows, shape.inner))
    squares = torch.empty((rows, shape.hidden // 16), dtype=torch.float32, device=device)
    parts, counts = config.parts(device), _counts(device)
    maps = [config.input_map(t) for t in (heads, x, hidden)]
    weights = (o, gate_up, down, qkv)
    of_weights = zip(*((its.data, its.scales) for its in weights), strict=True)
    tensors = (*chain.from_iterable(of_weights), x, hidden, projection, squares, parts, counts, bias)
    kernel, launch_shape = load(packed_kernel(shape, config), device), config.launch_shape(use_pdl(device))
    launch_kernel(kernel, launch_shape, maps, tensors, ctypes.c_int(rows), (ctypes.c_float * 2)(eps, eps_behind))
    return projection
