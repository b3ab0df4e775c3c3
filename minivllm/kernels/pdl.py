"""Programmatic dependent launch: a kernel starts while the one before it on the stream still runs (Hopper and later).

It saves a launch gap a kernel, and what a kernel reads that no kernel writes (weights, tables) streams in meanwhile.

A kernel takes part by three lines, under a constexpr flag that ``use_pdl`` decides::

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

1. ``launch_pdl=True`` if and only if every program of the kernel calls ``gdc_wait``, on every path, before it returns:
   without it nothing orders the kernel after those before it. It is also what makes completion transitive. ``gdc_wait``
   waits for the one kernel before; that one is complete only after its own wait, and so on back. A kernel that
   skipped it would let the next one run beside the one before the last.
2. Before ``gdc_wait`` a program loads only what no kernel of a step writes: weights, norm weights, cosines.
   Activations, the KV cache, block tables, positions, lengths, workspaces come after it.
3. All stores and atomics come after it too. A buffer that is written may still be read by an earlier kernel: the
   residual stream updated in place, a tensor whose memory the allocator has handed out again, a workspace.
4. Nothing is said by ``gdc_launch_dependents`` but "you may start": it publishes no data, so it stands at the top. In
   a grid of many waves it takes effect with the last one.
5. Decode attention reads more before its wait: what earlier kernels of the step wrote (work items, block tables) and,
   with the packed projection or as a stream of pages, older keys and values. It may because what stands right before it
   starts it late, with ``gdc_launch_dependents`` behind ``gdc_wait``: all that came before that kernel is complete
   then. Late are the product that makes q, k and v, the rotary kernel, the cache write, and attention itself where it
   takes q. A kernel of your own between these and attention must be late too, or an ordinary one. ``stream_decode``
   of the packed projection reads less ahead, and its product need not be late: work items, block tables and positions
   were complete before the step's first attention, which is not ``early``, let anything start; older keys are other
   steps'. Where rows share a prefix, the kernel that attends to it (``cascade.py``) stands between the product and
   ``stream_decode``, and is late: queries and new keys are complete when that starts, which waits for the shared parts
   alone, behind its first sequence's pages.
6. Kernels that know nothing of this (cuBLAS, torch's own, copies) may stand anywhere in the chain. Launched the
   ordinary way they start after the one before them is complete, and count as complete for the one behind them.

Stream capture keeps all this as programmatic edges of the CUDA graph. What a kernel has just written is no constant
yet: after loading or making weights, one ordinary kernel, copy or synchronization must come before the first kernel
that reads them early. A step's first copy to the device is one; a test that draws weights synchronizes.
"""

from functools import cache

import torch

from minivllm.kernels._triton import HAVE_TRITON, tl


@cache
def use_pdl(device: torch.device) -> bool:
    """Whether kernels on this device are launched so: capability 9.0 or later, and a Triton that can."""
    if device.type != "cuda" or torch.version.cuda is None or not HAVE_TRITON:
        return False
    cuda = getattr(getattr(tl, "extra", None), "cuda", None)
    return torch.cuda.get_device_capability(device)[0] >= 9 and hasattr(cuda, "gdc_wait")
