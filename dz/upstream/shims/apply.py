"""Put the shims in that a repository needs, for its own code alone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from dz.core.source import Source
from dz.upstream.installed import here
from dz.upstream.remote_facts import read_code
from dz.upstream.shims.imports import HOOK
from dz.upstream.shims.needs import needed, symbols_for
from dz.upstream.shims.scoped import put
from dz.upstream.shims.shim import Mend, Need, load


@dataclass(slots=True)
class Active:
    """The shims in effect for one repository. `owner` is the package that upstream gives its code."""

    owner: str
    needs: tuple[Need, ...]
    mends: list[Mend] = field(default_factory=list)
    _undo: list[Callable[[], None]] = field(default_factory=list)
    _seen: set[int] = field(default_factory=set)

    def settle(self) -> None:
        """Mend the classes that were imported since the last time."""
        from torch import nn

        for name, module in list(sys.modules.items()):
            if not name.startswith(self.owner + "."):
                continue
            for cls in [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == name]:
                if id(cls) in self._seen or not issubclass(cls, nn.Module):
                    continue
                self._seen.add(id(cls))
                for mend in self.mends:
                    if mend.on == "class":
                        load(mend.make)(cls)

    def configure(self, config: Any) -> None:
        """Mend a configuration that was just loaded."""
        for mend in self.mends:
            if mend.on == "configuration":
                load(mend.make)(config)

    def undo(self) -> None:
        """Take back what the repository's code saw; its classes stay mended."""
        for one in reversed(self._undo):
            one()
        self._undo.clear()
        _ACTIVE.pop(self.owner, None)


_ACTIVE: dict[str, Active] = {}


def activate(source: Source) -> Active:
    """Put in what the code of a source needs, once for each process. The caller has checked trust and pin."""
    owner = _owner(source)
    held = _ACTIVE.get(owner)
    if held is not None:
        return held
    code = read_code(source)
    needs = needed(code, here())
    active = Active(owner, needs, [m for n in needs for m in n.shim.mends])
    symbols = [s for n in needs for s in symbols_for(n, code)]
    if symbols:
        HOOK.give(owner, symbols)
        active._undo.append(lambda: HOOK.take_back(owner))
    for need in needs:
        for attribute in need.shim.attributes:
            module, _, cls = attribute.cls.partition(":")
            active._undo.append(put(getattr(import_module(module), cls), attribute, owner))
    _ACTIVE[owner] = active
    return active


@contextmanager
def loading(source: Source) -> Iterator[Active]:
    """The shims for a load: upstream's look for missing packages leaves out those that have a stand-in; at the end the
    classes that came in are mended."""
    from transformers import dynamic_module_utils

    active = activate(source)
    real = dynamic_module_utils.get_imports

    def get_imports(filename: Any) -> list[str]:
        """As upstream's, without packages that stand-ins take the place of."""
        return [name for name in real(filename) if name not in HOOK.packages()]

    dynamic_module_utils.get_imports = get_imports
    try:
        yield active
    finally:
        dynamic_module_utils.get_imports = real
    active.settle()


def _owner(source: Source) -> str:
    """The package in which upstream puts the code of a folder."""
    from transformers import dynamic_module_utils as upstream

    clean = getattr(upstream, "_sanitize_module_name", lambda name: name)
    root = vars(upstream)["TRANSFORMERS_DYNAMIC_MODULE_NAME"]
    return f"{root}.{clean(Path(source.folder).name)}"
