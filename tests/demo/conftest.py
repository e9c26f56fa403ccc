"""The demo repository, built once, and its model and processor by plain upstream classes."""

import pytest
import torch

from dz.demo.build import build


@pytest.fixture(scope="session")
def repository(tmp_path_factory):
    return build(tmp_path_factory.mktemp("demo") / "acorn")


@pytest.fixture(scope="session")
def auto():
    """upstream's Auto classes, offline."""
    patch = pytest.MonkeyPatch()
    patch.setenv("HF_HUB_OFFLINE", "1")
    import transformers

    yield transformers
    patch.undo()


@pytest.fixture(scope="session")
def model(repository, auto):
    torch.set_num_threads(1)
    loaded = auto.AutoModelForImageTextToText.from_pretrained(repository, trust_remote_code=True)
    return loaded.eval().requires_grad_(False)


@pytest.fixture(scope="session")
def processor(repository, auto):
    return auto.AutoProcessor.from_pretrained(repository, trust_remote_code=True)
