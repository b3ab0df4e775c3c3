"""Triton kernels, one file a job; ``experts/torch.py`` is what their tests compare with."""
