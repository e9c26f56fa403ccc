"""What the contract cannot ask of MXFP4 kernels, because NaN never passes it."""

import pytest
import torch

from dz.core.registry import Registry
from dz.ops.mxfp4_unpack import reference

KERNELS = Registry.discover().of("mxfp4_unpack")


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.technique)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_byte_255_makes_nan_of_its_block_and_of_no_other(kernel, dtype):
    packed = torch.arange(48, dtype=torch.uint8).view(3, 16)
    scales = torch.tensor([[255], [127], [254]], dtype=torch.uint8)
    device = "cpu"
    if torch.accelerator.is_available() and kernel.requires.device:
        device = torch.accelerator.current_accelerator().type
    got = kernel.run(packed.to(device), scales.to(device), dtype=dtype).cpu()
    want = reference(packed, scales, dtype=dtype)
    assert got[0].isnan().all() and not got[1:].isnan().any()
    assert torch.equal(got[1:], want[1:])


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.technique)
def test_dtypes_that_are_not_exact_are_refused(kernel):
    packed, scales = torch.zeros(1, 16, dtype=torch.uint8), torch.zeros(1, 1, dtype=torch.uint8)
    answer = kernel.supports({"packed": packed, "scales": scales, "dtype": "float16"})
    assert not answer.ok and "float16" in answer.reason
    answer = kernel.supports({"packed": packed, "scales": scales, "bias": None})
    assert not answer.ok and "bias" in answer.reason
