"""For every test. Without an accelerator Triton kernels run in Triton's interpreter, which Triton decides when it is
imported; so the variable is set before any test module is."""

import os

import torch

if not torch.accelerator.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
