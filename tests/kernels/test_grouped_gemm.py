"""What the contract cannot ask of the experts' products: NaN, refusals, every configuration, and the whole chain."""

import pytest
import torch

from dz.core.registry import Registry
from dz.errors import UsageError
from dz.kernels.expert_permute import triton as permute
from dz.kernels.grouped_gemm_fp8 import triton as eight
from dz.kernels.grouped_gemm_mxfp4 import triton as four
from dz.kernels.mxfp4_to_fp8 import triton as convert
from dz.ops import expert_combine, expert_gather, expert_permute, grouped_gemm_fp8, grouped_gemm_mxfp4, mxfp4_unpack
from dz.ops import experts as experts_op

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FEW = {
    "rows": 16,
    "columns": 64,
    "warps": 4,
    "stages": 2,
    "registers": 96,
    "per_sm": 1,
    "split": 1,
    "arranged": 0,
}


def mxfp4_case(name: str) -> dict:
    return next(c.args for c in grouped_gemm_mxfp4.inputs("bfloat16", DEVICE, 0) if c.id == name)


def fp8_case(name: str) -> dict:
    return next(c.args for c in grouped_gemm_fp8.inputs("bfloat16", DEVICE, 0) if c.id == name)


def test_scale_byte_255_makes_nan_of_its_output_column_only():
    args = mxfp4_case("e3_ragged_n48_k128")
    args["scales"][2, 7, 1] = 255
    out = four.run(**args)
    assert out[5:, 7].isnan().all()
    out[5:, 7] = 0
    assert not out.isnan().any()


@pytest.mark.gpu  # Triton's interpreter takes the code for 480
def test_a_nan_code_makes_nan_of_its_output_column_only():
    args = fp8_case("e3_ragged_n48_k96")
    args["weight"].view(torch.uint8)[0, 3, 9] = 0x7F
    out = eight.run(**args)
    assert out[:5, 3].isnan().all()
    out[:5, 3] = 0
    assert not out.isnan().any()


@pytest.mark.parametrize(
    ("case", "config"),
    [
        ("rows_of_no_expert", {"split": 2}),
        ("one_large_scale", {"split": 7}),
        ("one_large_scale", {"columns": 128}),
        ("e3_ragged_n48_k128", {"columns": 128, "warps": 8}),
        ("one_large_scale", {"rows": 32}),
        ("e5_some_empty_n136_k288", {"arranged": 1}),
        ("rows_of_no_expert", {"arranged": 1, "split": 3}),
    ],
    ids=lambda c: c if isinstance(c, str) else "_".join(f"{k}{v}" for k, v in c.items()),
)
def test_every_kind_of_configuration_of_the_mxfp4_product(case, config):
    args = mxfp4_case(case)
    with four.TUNE.override({**FEW, **config}):
        got = four.run(**args)
    torch.testing.assert_close(got, grouped_gemm_mxfp4.reference(**args), rtol=2**-7, atol=1e-2)


@pytest.mark.parametrize(("rows", "columns", "warps"), [(64, 128, 4), (128, 256, 8), (128, 128, 4)])
def test_every_kind_of_configuration_of_the_fp8_product(rows, columns, warps):
    args = fp8_case("e5_some_empty_n136_k272")
    with eight.TUNE.override({"rows": rows, "columns": columns, "warps": warps, "stages": 2, "per_sm": 1}):
        got = eight.run(**args)
    torch.testing.assert_close(got, grouped_gemm_fp8.reference(**args), rtol=2**-7, atol=1e-2)


def test_the_two_ways_of_sorting_agree():
    index = torch.randint(-1, 9, (150, 3), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    want = expert_permute.reference(index, 8)
    for few in (0, 1 << 20):
        with permute.TUNE.override({"few": few, "block": 64}):
            assert all(torch.equal(a, b) for a, b in zip(permute.run(index, 8), want, strict=True))


@pytest.mark.parametrize(
    ("kernel", "change", "words"),
    [
        (four.KERNEL, {"x": torch.zeros(3, 128, dtype=torch.float16)}, "float16"),
        (four.KERNEL, {"scales": torch.zeros(2, 8, 4, dtype=torch.uint8).transpose(0, 1)}, "contiguous"),
        (four.KERNEL, {"bias": None}, "bias"),
        (eight.KERNEL, {"x": torch.zeros(3, 24).to(torch.float8_e4m3fn)}, "multiples of 16"),
        (eight.KERNEL, {"weight": torch.zeros(2, 32, 8).to(torch.float8_e4m3fn).transpose(1, 2)}, "contiguous"),
        (eight.KERNEL, {"x_scale": torch.ones(3, dtype=torch.float16)}, "float16"),
    ],
)
def test_what_is_unsupported_is_refused_in_words(kernel, change, words):
    offsets = torch.tensor([0, 1, 3])
    given = {
        "grouped_gemm_mxfp4": {
            "x": torch.zeros(3, 128, dtype=torch.bfloat16),
            "packed": torch.zeros(2, 8, 64, dtype=torch.uint8),
            "scales": torch.zeros(2, 8, 4, dtype=torch.uint8),
        },
        "grouped_gemm_fp8": {
            "x": torch.zeros(3, 32).to(torch.float8_e4m3fn),
            "x_scale": torch.ones(3),
            "weight": torch.zeros(2, 8, 32).to(torch.float8_e4m3fn),
            "weight_scale": torch.ones(2, 8),
        },
    }[kernel.op]
    args = {**given, "offsets": offsets}
    assert kernel.supports(args).ok
    answer = kernel.supports({**args, **change})
    assert not answer.ok and words in answer.reason


@pytest.mark.parametrize("op", ["grouped_gemm_fp8", "grouped_gemm_mxfp4"])
def test_offsets_of_another_length_are_an_error(op):
    case = (fp8_case if op == "grouped_gemm_fp8" else mxfp4_case)("no_rows")
    case["offsets"] = case["offsets"][:-1]
    for run in (Registry.discover().op(op).reference, Registry.discover().kernel(f"{op}/triton").run):
        with pytest.raises(UsageError, match="offsets"):
            run(**case)


def test_a_layer_of_experts_folded_to_fp8_is_the_layer():
    """Sort, gather, fold, multiply, activate, multiply, combine, against the op of whole experts."""
    draw = torch.Generator().manual_seed(5)
    tokens, k, experts, dim, inner = 9, 2, 3, 64, 32
    x = torch.randn(tokens, dim, generator=draw).bfloat16().to(DEVICE)
    index = torch.randint(-1, experts + 1, (tokens, k), generator=draw).to(DEVICE)  # two of them of other ranks
    weight = torch.rand(tokens, k, generator=draw).to(DEVICE)

    def packed(n: int, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
        codes = torch.randint(0, 256, (experts, n, depth // 2), generator=draw, dtype=torch.uint8)
        return codes.to(DEVICE), torch.randint(120, 124, (experts, n, depth // 32), generator=draw).byte().to(DEVICE)

    up, down = packed(2 * inner, dim), packed(dim, inner)
    rows, places, offsets = permute.run(index, experts)
    h = eight.run(*expert_gather.reference(x, rows, k), *convert.run(*up)[:2], offsets)
    gate, value = h.float().chunk(2, -1)
    a = (torch.nn.functional.silu(gate) * value).bfloat16()
    order = torch.arange(len(rows), dtype=torch.int32, device=DEVICE)
    y = eight.run(*expert_gather.reference(a, order, 1), *convert.run(*down)[:2], offsets)
    got = expert_combine.reference(y, places, weight).float()
    wide = [mxfp4_unpack.reference(*pair, dtype="float32") for pair in (up, down)]
    want = experts_op.reference(x.float(), index, weight, *wide)
    assert (got - want).norm() / want.norm() < 0.06  # two roundings of activations to 4 bits, 2.6 % each
    assert want.norm() > 0.1
