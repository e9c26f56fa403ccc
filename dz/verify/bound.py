"""A binding at work: an op's arguments from a live module or function, and its result made into the site's."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from dz.core.inventory import Arg, Binding
from dz.errors import Refused


class Bound:
    """A site's target with its binding. `arguments(args, kwargs)` gives the op's arguments for a call of the site, or
    None for a call that the binding does not cover; `finish(result)` the site's result."""

    def __init__(self, target: Any, binding: Binding) -> None:
        self.target, self.binding = target, binding
        function = inspect.unwrap(type(target).forward if isinstance(target, nn.Module) else target)
        parameters = list(inspect.signature(function, follow_wrapped=False).parameters.values())
        self.parameters = parameters[1:] if isinstance(target, nn.Module) else parameters
        self.names = [p.name for p in self.parameters]
        self._getters = [(a.name, self._getter(a)) for a in binding.args]
        self._used = {a.path for a in binding.args if a.source == "forward"}
        self._used |= {str(a.value) for a in binding.args if a.source == "child"}
        self._single = self._used == {self.names[0]} if self.names else False
        self._then = operator.attrgetter(binding.then)(target) if binding.then else None

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
        """The op's arguments for a call of the site."""
        given = self._given(args, kwargs)
        return None if given is None else {name: get(given) for name, get in self._getters}

    def finish(self, result: Any) -> Any:
        """The site's result from the op's."""
        if self._then is not None:
            result = self._then(result)
        return (result, None) if self.binding.returns == "tuple_first" else result

    def _given(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
        """The call's arguments by name; None when one that is not bound differs from its default."""
        if self._single and len(args) == 1 and not kwargs:
            return {self.names[0]: args[0]}
        if len(args) > len(self.names) or not set(kwargs) <= set(self.names):
            return None
        given = dict(zip(self.names, args, strict=False)) | dict(kwargs)
        for p in self.parameters:
            if p.name in given:
                if p.name not in self._used and given[p.name] is not p.default:
                    return None
            elif p.name in self._used:
                if p.default is p.empty:
                    return None
                given[p.name] = p.default
        return given

    def _getter(self, a: Arg) -> Callable[[Mapping[str, Any]], Any]:
        if a.source == "constant":
            return lambda given, value=a.value: value
        if a.source == "forward":
            return lambda given, name=a.path: _plain(given[name])
        if a.source == "child":
            child = self._child(a)
            return lambda given, name=str(a.value): child(given[name])
        if a.source in ("parameter", "attribute"):
            get = operator.attrgetter(a.path)
            get(self.target)
            return lambda given: get(self.target)
        raise Refused(
            f"a binding of unknown source '{a.source}'", f"argument {a.name}", "dz adapt MODEL", code="bad_binding"
        )

    def _child(self, a: Arg) -> Callable[[Any], Any]:
        # Looked up at each call: a child may be swapped itself, or moved by the loader.
        parent, _, leaf = a.path.rpartition(".")
        owner = self.target.get_submodule(parent)
        return lambda x: getattr(owner, leaf)(x)


def _plain(value: Any) -> Any:
    """Dtypes by name: ops and kernels take them so."""
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
