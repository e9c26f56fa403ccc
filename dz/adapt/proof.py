"""Verification for a plan: each site once, on its real weights where they are there."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from dz.core.inventory import Site
from dz.core.kernel import Kernel
from dz.core.protocols import Progress
from dz.core.registry import Registry
from dz.upstream.build import Built, dtype_of
from dz.verify.sites import Verdict, verify
from dz.verify.subject import Subject, reader, subject
from dz.weights.checkpoint import Checkpoint


class Prover:
    """Verdicts for (site, kernel, phase), on `device`. Subjects are built one at a time and dropped with their site."""

    def __init__(
        self,
        built: Built,
        registry: Registry,
        placed: Mapping[str, str],
        checkpoint: Checkpoint | None,
        *,
        dtype: str,
        device: str,
        progress: Progress,
    ) -> None:
        self._built, self._registry, self._placed, self._checkpoint = built, registry, placed, checkpoint
        self._dtype, self._device, self._progress = dtype, device, progress
        self._held: tuple[str, Subject] | None = None

    def __call__(self, site: Site, kernel: Kernel | None, phase: str) -> Verdict:
        """The verdict on a kernel (None: the op's reference) at a site in a phase."""
        op = self._registry.op(str(site.op))
        return verify(op, kernel, self._subject(site), dtype=self._dtype, device=self._device, phase=phase)

    def _subject(self, site: Site) -> Subject:
        if self._held is None or self._held[0] != site.id:
            self._held = (site.id, self._make(site))
            self._progress.advance()
        return self._held[1]

    def _make(self, site: Site) -> Subject:
        live, member = self._live(site)
        get: Any = self._checkpoint.get if self._checkpoint is not None else None
        read = reader(self._placed, member, get) if get is not None else (lambda name, shape: None)
        return subject(site, live, read, dtype=dtype_of(self._dtype), device=self._device)

    def _live(self, site: Site) -> tuple[Any, str]:
        if site.kind == "function":
            home, _, name = site.id.partition(":")
            return vars(sys.modules[home])[name], ""
        return self._built.model.get_submodule(site.members[0]), site.members[0]
