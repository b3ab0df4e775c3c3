"""A linear layer with many outputs and a packed weight (``packed_weights.py``), for few rows, on Hopper: the LM head.

The kernel is CUDA C++ (``packed_linear.cu``): one program per SM, all at once, as in ``packed_chain``; launch them on
one stream.

Bytes moved: 12 bits per weight, once; from L2 to an SM the rows' k for each 256 lines (rows of the weight).
Qwen3-0.6B's LM head is 238 MB, so 53 µs at 4.5 TB/s; unpacked it takes 72.
"""

import ctypes
from functools import cache

import torch

from minivllm.kernels import nvrtc
from minivllm.kernels._triton import compiling, num_sms
from minivllm.kernels.hopper import Kernel, launch_kernel, load
from minivllm.kernels.linear.packed_config import PackedConfig, packed_config
from minivllm.kernels.linear.packed_weights import Order, PackedWeight
from minivllm.kernels.pdl import use_pdl

MIN_WEIGHTS = 100_000_000  # for smaller weights, start and end cost as much as the stream


@cache
def linear_config(rows: int, lines: int, k: int, sms: int) -> PackedConfig | None:
    return packed_config(rows, [(lines, k)], sms)


@cache
def linear_kernel(lines: int, k: int, config: PackedConfig) -> Kernel:
    return config.kernel("packed_linear", {"N": lines, "K": k})


def use_packed_linear(rows: int, lines: int, k: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernel supports such a product and runs on the device."""
    if dtype != torch.bfloat16 or not nvrtc.available(device):
        return False
    config = linear_config(rows, lines, k, num_sms(device))
    return config is not None and config.runs(linear_kernel(lines, k, config), device)


def packed_linear(x: torch.Tensor, packed: PackedWeight) -> torch.Tensor:
    """x (t, k) with contiguous rows -> (t, lines): x @ weight.T; both bfloat16."""
    (lines, k), rows = packed.weight.shape, len(x)
    config = linear_config(rows, lines, k, num_sms(x.device))
    assert config is not None and x.shape[1] == k and x.stride(1) == 1 and not packed.gated
    assert packed.order is Order.UNITS
    out = x.new_empty((rows, lines))
    if compiling():
        return out
    kernel, shape = load(linear_kernel(lines, k, config), x.device), config.launch_shape(use_pdl(x.device))
    tensors = (packed.data, packed.scales, out, config.parts(x.device))
    launch_kernel(kernel, shape, [config.input_map(x)], tensors, ctypes.c_int(rows))
    return out
