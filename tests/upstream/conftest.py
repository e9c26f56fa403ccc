"""The engine's loader, for tests of what a load leaves behind."""

import contextlib
import importlib.util
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def loading(tiny):
    """dz.engine.loader.load of a folder, everything at its default for a tiny model."""

    def load(folder, *, dtype="float32", trust=False):
        from dz.engine.loader import Wishes
        from dz.engine.loader import load as load_model

        wishes = Wishes(
            dtype=dtype,
            max_model_len=0,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            block_size=4,
            num_blocks=0,
            device="cpu",
            budget=1 << 30,
        )
        none = lambda model, plan, phase: contextlib.nullcontext()  # noqa: E731
        return load_model(tiny.source(folder), None, wishes, trust=trust, bind=none, tell=lambda text: None)

    return load


@pytest.fixture(scope="session")
def old_style():
    """tests/upstream/old_style.py: a repository written for transformers 4.3x."""
    spec = importlib.util.spec_from_file_location("dz_tests_old_style", Path(__file__).with_name("old_style.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
