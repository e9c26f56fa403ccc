"""Mends what Triton's interpreter computes otherwise than a device does, so that a kernel is judged on its own merits.

Triton 3.6 to 3.9: fp32 -> bfloat16 truncates instead of rounding to nearest even, bfloat16 -> fp32 loses subnormal
numbers, fp32 -> e4m3 loses the carry of a fraction rounded up, and tl.dot multiplies the raw bits of bfloat16
operands."""

import numpy as np
import pytest
import torch


def _round_bfloat16(values: np.ndarray) -> np.ndarray:
    """fp32 as bfloat16 bits (uint16), round to nearest even."""
    return torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16).view(torch.uint16).numpy()


@pytest.fixture(autouse=True, scope="session")
def mended_interpreter():
    import triton
    import triton.language as tl

    if not triton.knobs.runtime.interpret:
        yield
        return
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    convert, dot = interpreter._convert_float, builder.create_dot

    def convert_float(input, input_dtype, output_dtype, rounding_mode):
        if input_dtype == tl.float32 and output_dtype == tl.bfloat16:
            return _round_bfloat16(input).reshape(input.shape)
        if input_dtype == tl.float32 and output_dtype == tl.float8e4nv:
            rounded = torch.from_numpy(np.ascontiguousarray(input)).to(torch.float8_e4m3fn)
            return rounded.view(torch.uint8).numpy().reshape(input.shape)
        if input_dtype == tl.bfloat16 and output_dtype == tl.float32:
            return (input.view(np.uint16).astype(np.uint32) << 16).reshape(input.shape)
        return convert(input, input_dtype, output_dtype, rounding_mode)

    def create_dot(self, a, b, d, *rest):
        wide = [self.cast_impl(t, tl.float32) if t.dtype.scalar == tl.bfloat16 else t for t in (a, b)]
        return dot(self, *wide, d, *rest)

    interpreter._convert_float, builder.create_dot = convert_float, create_dot
    yield
    interpreter._convert_float, builder.create_dot = convert, dot
