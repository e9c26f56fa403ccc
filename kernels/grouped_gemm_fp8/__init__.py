"""Implementations of grouped_gemm_fp8."""
