"""The shipped profiles: sane figures, and drivers' names that lead to one of them."""

import re

import pytest

from dz.backends import ORDER, profile
from dz.backends.profiles import match, profiles

DRIVERS = {
    "NVIDIA A100-SXM4-40GB": "A100-40G",
    "NVIDIA A100-SXM4-80GB": "A100",
    "NVIDIA L40S": "L40S",
    "NVIDIA H20": "H20",
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H200": "H200",
    "NVIDIA B200": "B200",
    "NVIDIA B300 SXM6 AC": "B300",
    "AMD Instinct MI300X": "MI300X",
    "AMD Instinct MI355X": "MI355X",
}


@pytest.mark.parametrize(("driver", "name"), DRIVERS.items())
def test_a_drivers_name_leads_to_one_profile(driver, name):
    found = match(driver)
    assert found is not None and found.device.name == name
    assert [n for n, p in profiles().items() if re.search(p.match, driver)] == [name]


@pytest.mark.parametrize("name", profiles())
def test_figures_are_sane(name):
    device = profile(f"{name}x4")
    assert device.count == 4 and device.kind in ORDER and device.name == name
    assert 10e9 < device.memory < 400e9 and 0.05e12 < device.bandwidth < 20e12
    assert set(device.flops) <= set(device.dtypes)
    assert device.flops["bfloat16"] >= device.flops["float32"]
    assert (device.kind == "cuda") == (device.arch is not None)
    assert profiles()[name].origin in ("measured", "data sheet", "round figures")
