"""Implementations of grouped_gemm_mxfp4."""
