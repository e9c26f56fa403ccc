"""Device profiles, read from profiles.toml beside this file."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from dz.core.device import Device

FILE = Path(__file__).with_name("profiles.toml")


@dataclass(frozen=True, slots=True)
class Profile:
    """A device, the pattern that recognises its driver's name, and where the figures come from."""

    device: Device
    match: str
    origin: str


@cache
def profiles() -> dict[str, Profile]:
    """Every profile by name, in the order of the file."""
    return {
        name: Profile(
            device=Device(
                kind=row["kind"],
                name=name,
                arch=row.get("arch"),
                memory=row["memory"],
                dtypes=tuple(row["dtypes"]),
                bandwidth=row["bandwidth"],
                flops=dict(row["flops"]),
            ),
            match=row["match"],
            origin=row["origin"],
        )
        for name, row in tomllib.loads(FILE.read_text("utf-8")).items()
    }


def match(name: str) -> Profile | None:
    """The profile of a device by the name that its driver gives, None if no profile is of it."""
    return next((p for p in profiles().values() if re.search(p.match, name, re.IGNORECASE)), None)
