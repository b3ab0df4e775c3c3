"""Kernels run on a CPU in Triton's interpreter, which must be chosen before Triton is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
