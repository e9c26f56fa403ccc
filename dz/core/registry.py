"""The registry: ops and kernels found by folder, refusals recorded, selection explained."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dz.core.device import Device
from dz.core.kernel import Kernel
from dz.core.op import Op
from dz.core.plan import Rejected
from dz.errors import Refused, UsageError
from dz.shipped import outside

_OPS = "dz.ops"  # discovered as the kernels are: by folder, when they are asked for


@dataclass(frozen=True, slots=True)
class Selection:
    """A chosen kernel (None: no kernel is eligible), the reason, and every candidate that was not taken."""

    kernel: Kernel | None
    reason: str
    rejected: tuple[Rejected, ...] = ()


@dataclass(slots=True)
class Registry:
    """Ops by name, kernels by `<op>/<technique>`, and what could not be imported with the reason."""

    ops: dict[str, Op] = field(default_factory=dict)
    kernels: dict[str, Kernel] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)

    @classmethod
    def discover(cls) -> Registry:
        """Every `OP` in dz/ops and every `KERNEL` in kernels/<op>/<technique>.py, `$DZ_PATH` folders included.

        Raises Refused for an op's file outside that cannot be imported or that bears the name of another."""
        self = cls()
        for module in _op_modules():
            op = getattr(module, "OP", None)
            if op is not None:
                self.add_op(op)
        import dz.kernels

        roots = [Path(p) for p in dz.kernels.__path__]
        found = {d.name for root in roots if root.is_dir() for d in root.iterdir() if d.is_dir()}
        for op in sorted(name for name in found if name.isidentifier() and name != "common" and name[0] != "_"):
            self._discover_kernels(op, [str(root / op) for root in roots if (root / op).is_dir()])
        return self

    def _discover_kernels(self, op: str, folders: list[str]) -> None:
        """The techniques of an op in every folder that has some, a folder outside the checkout as good as ours."""
        names = [m.name for folder in folders for m in pkgutil.iter_modules([folder]) if not m.name.startswith("_")]
        for name in names:
            key = f"{op}/{name}"
            if names.count(name) > 1:
                where = "two files define it: " + " and ".join(f"{f}/{name}.py" for f in folders)
                raise Refused(f"the kernel '{key}' is registered twice", where, "remove one of them", code="duplicate")
            try:
                importlib.import_module(f"dz.kernels.{op}").__path__ = folders
                module = importlib.import_module(f"dz.kernels.{op}.{name}")
            except Exception as e:  # noqa: BLE001  a kernel's own import may fail in any way; it is recorded, not hidden
                self.unavailable[key] = f"{type(e).__name__}: {e}"
                continue
            kernel = getattr(module, "KERNEL", None)
            if kernel is None:
                self.unavailable[key] = "the file defines no KERNEL"
            elif kernel.key != key:
                self.unavailable[key] = f"the file calls itself {kernel.key}"
            else:
                self.add_kernel(kernel)

    def add_op(self, op: Op) -> None:
        """Register an op; a second one of the same name is refused."""
        if op.name in self.ops:
            raise Refused(
                f"the op '{op.name}' is registered twice", "two files define it", "remove one of them", code="duplicate"
            )
        self.ops[op.name] = op

    def add_kernel(self, kernel: Kernel) -> None:
        """Register a kernel of a known op; a second one of the same key is refused."""
        if kernel.key in self.kernels:
            raise Refused(
                f"the kernel '{kernel.key}' is registered twice",
                "two files define it",
                "remove one of them",
                code="duplicate",
            )
        if kernel.op not in self.ops:
            self.unavailable[kernel.key] = f"there is no op '{kernel.op}'"
            return
        self.kernels[kernel.key] = kernel

    def op(self, name: str) -> Op:
        """The op of this name. Raises UsageError with the nearest name."""
        return _lookup("op", name, self.ops, "dz ops ls")

    def kernel(self, key: str) -> Kernel:
        """The kernel of this key. Raises UsageError with the nearest key, or says why it is unavailable."""
        if key in self.unavailable:
            raise UsageError(
                f"the kernel '{key}' is unavailable", self.unavailable[key], "dz kernels ls", code="unavailable"
            )
        return _lookup("kernel", key, self.kernels, "dz kernels ls")

    def of(self, op: str) -> list[Kernel]:
        """The kernels of an op, by technique."""
        return sorted((k for k in self.kernels.values() if k.op == op), key=lambda k: k.technique)

    def select(
        self,
        op: str,
        device: Device,
        dtype: str,
        phase: str,
        *,
        prefer: Iterable[str] = (),
        args: Mapping[str, Any] | None = None,
    ) -> Selection:
        """The kernel for an op: the first of `prefer` that is eligible, else the only eligible one. With `args` (a
        representative argument set) each candidate is also asked whether it supports them.

        Raises Refused when several are eligible and none is preferred: dz does not guess."""
        eligible: list[Kernel] = []
        rejected: list[Rejected] = []
        for kernel in self.of(op):
            answer = kernel.requires.check(device, dtype, phase)
            if answer.ok and args is not None:
                answer = kernel.supports(args)
            if answer.ok:
                eligible.append(kernel)
            else:
                rejected.append(Rejected(impl=kernel.key, reason=answer.reason))
        rejected += [
            Rejected(impl=key, reason=f"unavailable: {why}")
            for key, why in self.unavailable.items()
            if key.startswith(f"{op}/")
        ]
        for rank, want in enumerate(prefer):
            for kernel in eligible:
                if want in (kernel.key, kernel.technique):
                    rest = tuple(
                        Rejected(impl=k.key, reason=f"{kernel.technique} is preferred")
                        for k in eligible
                        if k is not kernel
                    )
                    return Selection(kernel, f"preference {rank + 1}" if rank else "preferred", (*rejected, *rest))
        if not eligible:
            return Selection(None, "no eligible kernel" if self.of(op) else "no kernel is registered", tuple(rejected))
        if len(eligible) > 1:
            names = ", ".join(k.key for k in eligible)
            raise Refused(
                f"several kernels fit op '{op}' on {device.spec} ({dtype}, {phase})",
                f"{names}; none is preferred",
                f"name one: --set {op}={eligible[0].key}",
                code="ambiguous",
            )
        return Selection(eligible[0], f"only eligible on {device.spec}", tuple(rejected))


def _op_modules() -> list[Any]:
    """The modules of dz/ops, then those of the ops folders of `$DZ_PATH`, which become part of the package."""
    package = importlib.import_module(_OPS)
    own, extra = Path(str(package.__file__)).parent, outside("ops")
    package.__path__ = [str(f) for f in (own, *extra)]
    out, seen = [], dict[str, Path]()
    for folder in (own, *extra):
        for m in pkgutil.iter_modules([str(folder)]):
            if m.name.startswith("_"):
                continue
            if m.name in seen:
                where = f"{seen[m.name] / m.name}.py and {folder / m.name}.py define it"
                raise Refused(f"the op '{m.name}' is there twice", where, "rename one of them", code="duplicate")
            seen[m.name] = folder
            out.append(_op_module(m.name, folder, folder is own))
    return out


def _op_module(name: str, folder: Path, ours: bool) -> Any:
    try:
        return importlib.import_module(f"{_OPS}.{name}")
    except Exception as e:  # an op of somebody else may fail in any way when it is imported; it is named
        if ours:
            raise
        what = f"the op in {folder / name}.py cannot be imported"
        raise Refused(what, f"{type(e).__name__}: {e}", "mend it, or take it out of DZ_PATH", code="bad_op") from e


def _lookup(kind: str, name: str, table: Mapping[str, Any], listing: str) -> Any:
    if name in table:
        return table[name]
    near = difflib.get_close_matches(name, list(table), 1)
    why = f"did you mean '{near[0]}'?" if near else f"there are {len(table)} {kind}s"
    raise UsageError(f"no {kind} is called '{name}'", why, listing, code=f"unknown_{kind}")
