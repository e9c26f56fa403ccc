"""MLA: the expanded and the absorbed form agree."""

import pytest
import torch

from dz.errors import UsageError
from dz.ops.mla import absorbed, inputs, reference

CASES = {c.id: c.args for c in inputs("float64", "cpu", 5)}


@pytest.mark.parametrize("name", CASES)
def test_absorbed_equals_expanded(name):
    args = CASES[name]
    got, want = absorbed(**args), reference(**args)
    assert want.isfinite().all()
    torch.testing.assert_close(got, want)


def test_the_scale_is_that_of_the_expanded_head():
    args = CASES["prefill_h3_s7"]
    dims = args["q_nope"].shape[-1] + args["q_rope"].shape[-1]
    torch.testing.assert_close(reference(**args), reference(**args, scale=dims**-0.5))
    latent_scale = (args["latent"].shape[-1] + args["k_rope"].shape[-1]) ** -0.5
    assert (absorbed(**args) - absorbed(**args, scale=latent_scale)).abs().max() > 1e-3


def test_rope_channels_count():
    args = CASES["prefill_h3_s7"]
    other = {**args, "k_rope": args["k_rope"] * 2}
    assert (reference(**args) - reference(**other)).abs().max() > 1e-3


def test_heads_that_do_not_fit_are_refused():
    args = {**CASES["prefill_h3_s7"], "kv_b": torch.zeros(35, 24)}
    with pytest.raises(UsageError, match="35 rows"):
        reference(**args)
