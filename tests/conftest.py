"""For every test. Without an accelerator Triton kernels run in Triton's interpreter, which Triton decides when it is
imported; so the variable is set before any test module is. So is the folder where upstream copies repository code: the
package that it makes of it is found once a process, so one folder must serve all tests."""

import atexit
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import torch

if not torch.accelerator.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp(prefix="dz-tests-modules-")
atexit.register(shutil.rmtree, os.environ["HF_MODULES_CACHE"], ignore_errors=True)


def _beside(file, name):
    path = Path(__file__).with_name(file)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tiny():
    """tests/tiny.py: tiny random checkpoints of many architectures, and what upstream generates from them."""
    torch.set_num_threads(1)
    return _beside("tiny.py", "dz_tests_tiny_checkpoints")


@pytest.fixture(scope="session")
def giant():
    """tests/giant.py: repositories of headers alone, of any size."""
    return _beside("giant.py", "dz_tests_giant")
