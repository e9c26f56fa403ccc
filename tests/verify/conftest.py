"""Tiny checkpoints, shared by the tests of inspect, swap, verify and adapt."""

import importlib.util
from pathlib import Path

import pytest

_PATH = Path(__file__).resolve().parent.parent / "adapt" / "tiny.py"


@pytest.fixture(scope="session")
def tiny():
    spec = importlib.util.spec_from_file_location("dz_tests_tiny", _PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
