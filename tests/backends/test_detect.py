"""From a device's spec to a Device, on hardware that is here and that is not."""

import types

import pytest
import torch

from dz import backends
from dz.backends.base import Accelerator
from dz.backends.profiles import match, profiles
from dz.core.device import Device
from dz.errors import EnvironmentFailure, UsageError


class Module:
    """A torch device module with two devices."""

    CUDAGraph = type("CUDAGraph", (), {})

    def __init__(self, name="NVIDIA H200", capability=(9, 0), count=2):
        self._name, self._capability, self._count = name, capability, count

    def is_available(self):
        return self._count > 0

    def device_count(self):
        return self._count

    def get_device_name(self, index):
        return self._name

    def get_device_capability(self, index):
        return self._capability

    def mem_get_info(self, index):
        return (100 - index, 200 + index)


@pytest.fixture
def gpus(monkeypatch):
    """Make torch.cuda look like a machine with these devices."""

    def install(hip: bool = False, **kwargs):
        monkeypatch.setattr(torch, "cuda", Module(**kwargs))
        monkeypatch.setattr(
            torch, "version", types.SimpleNamespace(cuda=None if hip else "13.0", hip="7" if hip else None)
        )

    return install


@pytest.fixture
def nothing(monkeypatch):
    """A machine without accelerators, whatever this one has."""
    monkeypatch.setattr(torch, "version", types.SimpleNamespace(cuda=None, hip=None, xpu=None))
    for name in ("npu", "musa"):
        monkeypatch.delattr(torch, name, raising=False)


def test_auto_falls_back_to_the_host(nothing):
    device = backends.detect()
    assert device == backends.detect("auto") == backends.detect("cpu")
    assert device.kind == "cpu" and device.name and device.memory > 1 << 28 and device.arch is None
    free, total = backends.memory(device)
    assert 0 < free <= total == device.memory
    assert backends.here(device) and backends.graph_class(device) is None


def test_auto_prefers_an_accelerator_and_knows_its_rates(gpus):
    gpus()
    device = backends.detect()
    known = profiles()["H200"].device
    assert (device.kind, device.name, device.arch, device.count) == ("cuda", "NVIDIA H200", 90, 1)
    assert device.memory == 200 and device.bandwidth == known.bandwidth and device.flops == known.flops
    assert "float8_e4m3fn" in device.dtypes and "float4_e2m1fn_x2" not in device.dtypes
    assert backends.memory(device) == (100, 200)
    assert backends.memory(backends.detect("cuda x2")) == (99, 200)
    assert backends.graph_class(device) is Module.CUDAGraph


def test_a_hip_build_is_another_kind(gpus):
    gpus(hip=True, name="AMD Instinct MI300X")
    device = backends.detect()
    assert (device.kind, device.arch, device.bandwidth) == ("rocm", None, 5.3e12)
    with pytest.raises(EnvironmentFailure, match="no cuda device"):
        backends.detect("cuda")


@pytest.mark.parametrize(
    ("capability", "has", "lacks"),
    [
        ((7, 5), "float16", "bfloat16"),
        ((8, 0), "bfloat16", "float8_e4m3fn"),
        ((8, 9), "float8_e4m3fn", "float4_e2m1fn_x2"),
        ((10, 0), "float4_e2m1fn_x2", "x"),
    ],
)
def test_formats_follow_the_architecture(gpus, capability, has, lacks):
    gpus(name="made up", capability=capability)
    device = backends.detect("cuda")
    assert has in device.dtypes and lacks not in device.dtypes and device.bandwidth == 0


def test_what_is_not_here(nothing, gpus):
    with pytest.raises(EnvironmentFailure) as e:
        backends.detect("cuda")
    assert e.value.exit_code == 3 and "needs a CUDA build of torch" in e.value.why
    with pytest.raises(EnvironmentFailure, match="no npu device"):
        backends.detect("npu")
    gpus(count=0)
    with pytest.raises(EnvironmentFailure) as e:
        backends.detect("cuda")
    assert "no driver, or none is visible" in e.value.why
    gpus(count=2)
    with pytest.raises(EnvironmentFailure, match="4 cuda devices wanted, 2 here"):
        backends.detect("cuda x4")


@pytest.mark.parametrize(
    ("spec", "name", "count"),
    [
        ("H200", "H200", 1),
        ("h200", "H200", 1),
        ("H200x8", "H200", 8),
        ("H200 x8", "H200", 8),
        ("MI300X", "MI300X", 1),
        ("MI300Xx4", "MI300X", 4),
        ("mi300x x4", "MI300X", 4),
        ("CPU-64G", "CPU-64G", 1),
    ],
)
def test_profiles_to_plan_for(spec, name, count):
    device = backends.detect(spec)
    assert device == backends.profile(spec) and (device.name, device.count) == (name, count)
    assert backends.memory(device) == (device.memory, device.memory) and not backends.here(device)


def test_an_architecture_to_plan_for(nothing):
    device = backends.detect("cuda:sm90 x8")
    assert device.spec == "cuda:sm90 x8" and device.memory == 0 and "float8_e4m3fn" in device.dtypes
    assert backends.detect(device.spec) == device


def test_an_architecture_that_is_here_is_the_device(gpus):
    gpus()
    assert backends.detect("cuda:sm90").name == "NVIDIA H200"
    assert backends.detect("cuda:sm100").name == "cuda:sm100"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("H300", "did you mean 'H200'?"),
        ("cdua", "did you mean 'cuda'?"),
        ("zzzzzz", "known are auto, cuda"),
        ("", "known are"),
        ("cuda:1", "CUDA_VISIBLE_DEVICES=1"),
        ("rocm:1", "ROCR_VISIBLE_DEVICES=1"),
        ("cuda:sm", "'sm' is no architecture"),
        ("cpu:sm90", "is no architecture"),
        ("H200x0", "H200x0"),
        ("auto:sm90", "auto:sm90"),
    ],
)
def test_unknown_names(spec, words):
    with pytest.raises(UsageError) as e:
        backends.detect(spec)
    assert words in " ".join(e.value.lines())


def test_a_profile_by_an_unknown_name():
    with pytest.raises(UsageError, match="H300x8"):
        backends.profile("H300x8")
    with pytest.raises(UsageError):
        backends.profile("cpu")


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-PCIE-40GB", "A100-40G"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA H100 PCIe", None),
        ("AMD EPYC 9554", None),
    ],
)
def test_drivers_names(driver, name):
    found = match(driver)
    assert (found.device.name if found else None) == name


def test_profiles_are_whole():
    for name, p in profiles().items():
        d = p.device
        assert d.kind in backends.ORDER and d.memory > 10**9 and d.bandwidth > 1e10 and p.origin, name
        assert "bfloat16" in d.dtypes and d.flops and set(d.flops) <= set(d.dtypes), name
        assert (d.arch is not None) == (d.kind == "cuda"), name
        assert all(hasattr(torch, t) for t in d.dtypes), name
        if d.kind == "cuda":
            assert set(d.dtypes) == set(backends.backend("cuda").dtypes(d.arch)), name


@pytest.mark.parametrize("kind", backends.ORDER)
def test_every_kind_has_its_file(kind):
    found = backends.backend(kind)
    assert found.kind == kind and found.dtypes(None)
    assert isinstance(found.count(), int)
    if kind != "cpu":
        assert isinstance(found, Accelerator) and (found.count() or found.absent())


def test_kinds_are_known_by_name():
    with pytest.raises(UsageError):
        backends.backend("base")


@pytest.mark.gpu
def test_the_device_here():
    device = backends.detect()
    free, total = backends.memory(device)
    assert device.kind != "cpu" and 0 < free <= total == device.memory and backends.here(device)
    x = torch.ones(1 << 28, dtype=torch.uint8, device=torch.accelerator.current_accelerator())
    assert backends.memory(device)[0] <= free - x.numel()
    assert isinstance(device, Device) and backends.graph_class(device) is not None
