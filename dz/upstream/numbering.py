"""Numbered tensors that upstream stacks into one: it takes them in their order, so each number must be there."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any


def numbering_faults(mapping: Iterable[Any], names: Iterable[str]) -> tuple[list[str], list[str]]:
    """(missing, unexpected) among the tensors that upstream's `mapping` stacks (experts, say). A gap or a number beyond
    the end would shift all later ones by one place, with every shape right."""
    from transformers.core_model_loading import MergeModulelist

    patterns = [
        re.compile(p.replace("*.", r"(?P<item>\d+)\.", 1))
        for rule in mapping
        if any(isinstance(op, MergeModulelist) for op in getattr(rule, "operations", ()))
        for p in rule.source_patterns
        if "*." in p
    ]
    lists: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))  # where -> what -> numbers
    for name in names:
        for pattern in patterns:
            if m := pattern.search(name):
                lists[name[: m.start("item")]][name[m.end("item") :]].add(int(m["item"]))
    missing, unexpected = [], []
    for where, by_rest in lists.items():
        most = max(len(numbers) for numbers in by_rest.values())
        for rest, numbers in by_rest.items():
            if numbers == set(range(len(numbers))):  # siblings may be longer: some experts have fewer matrices
                continue
            missing += [f"{where}{i}{rest}" for i in sorted(set(range(most)) - numbers)]
            unexpected += [f"{where}{i}{rest}" for i in sorted(numbers - set(range(most)))]
    return missing, unexpected
