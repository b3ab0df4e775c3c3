"""Programmatic dependent launch: a kernel starts while the previous one on the stream still runs (Hopper and later).

It saves a launch gap per kernel; meanwhile the kernel loads data that no kernel writes (weights, tables).

A kernel takes part with three additions, under a constexpr flag that ``use_pdl`` decides::

    # in the launcher
    pdl = use_pdl(x.device)
    _kernel[grid](..., PDL=pdl, launch_pdl=pdl)

    # in the kernel
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()  # at the top: the next kernel may start once every program is here
    ...                                        # loads of constants only
    if PDL:
        tl.extra.cuda.gdc_wait()               # every kernel before this one is complete, its writes visible
    ...                                        # everything else

The rule:

1. ``launch_pdl=True`` if and only if every program of the kernel calls ``gdc_wait`` before it returns, on every path:
   nothing else orders the kernel after earlier ones. It also makes completion transitive: ``gdc_wait`` waits only for
   the previous kernel, but that one completes only after its own wait, and so on back. A kernel that skipped it would
   let its successor run alongside its predecessor.
2. Before ``gdc_wait`` a program loads only what no kernel of a step writes: weights, norm weights, cosines.
   Activations, the KV cache, block tables, positions, lengths and workspaces come after it.
3. All stores and atomics come after it, too. An earlier kernel may still read a buffer that is written: the residual
   stream updated in place, a tensor in memory that the allocator has reused, a workspace.
4. ``gdc_launch_dependents`` only allows the next kernel to start. It publishes no data, so it goes at the top. In a
   grid of many waves it takes effect with the last one.
5. Decode attention reads more before its wait: what earlier kernels of the step wrote (work items, block tables) and,
   with the packed projection or as a stream of pages, older keys and values. That is safe because the kernel right
   before it triggers late, with ``gdc_launch_dependents`` after ``gdc_wait``: everything before that kernel is then
   complete. Late kernels are the product that makes q, k and v, the rotary kernel, the cache write, and attention
   itself if it takes q. A kernel of your own between these and attention must be late, too, or an ordinary one.
   ``stream_decode`` with the packed projection reads less early, and its product need not be late: work items, block
   tables and positions were complete before the step's first attention, which is not ``early``, triggered anything;
   older keys are from other steps. If rows share a prefix, the kernel that attends to it (``cascade.py``) runs between
   the product and ``stream_decode`` and is late: when it triggers, queries and new keys are complete. ``stream_decode``
   then waits only for the shared parts, after its first sequence's pages.
6. Kernels without PDL (cuBLAS, torch's own, copies) may be anywhere in the chain. Launched the ordinary way, they start
   when the kernel before them is complete, and count as complete for the next one.

Stream capture keeps all this as programmatic edges of the CUDA graph. What a kernel has just written is not yet
constant: after loading or creating weights, an ordinary kernel, copy or synchronization must come before the first
kernel that reads them early. A step's first copy to the device is one; a test that draws weights synchronizes.
"""

from functools import cache

import torch

from minivllm.kernels._triton import HAVE_TRITON, tl


@cache
def use_pdl(device: torch.device) -> bool:
    """Whether kernels on this device use it: compute capability 9.0 or later, and a Triton version that supports it."""
    if device.type != "cuda" or torch.version.cuda is None or not HAVE_TRITON:
        return False
    cuda = getattr(getattr(tl, "extra", None), "cuda", None)
    return torch.cuda.get_device_capability(device)[0] >= 9 and hasattr(cuda, "gdc_wait")
