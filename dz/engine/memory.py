"""One memory plan: everything that will be allocated, sized together before anything is."""

from __future__ import annotations

from dataclasses import dataclass

from dz.core.plan import MemoryRow
from dz.errors import Refused

SHORTEST = 2  # tokens of a context: one of the prompt and one of the answer
UNSTATED = 1 << 20  # tokens; the longest context of a model whose configuration names none


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a model costs: weight bytes, cache bytes per token and fixed bytes per sequence, activation bytes of a full
    step; `measured` says how the cache figures were found."""

    weights: int
    per_token: int
    per_sequence: int
    activations: int
    measured: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The decision: rows to print, pool sizes, and the longest context that they allow."""

    rows: tuple[MemoryRow, ...]
    blocks: int
    slots: int
    max_model_len: int


def make(
    needs: Needs, *, budget: int, asked_len: int, model_len: int, max_num_seqs: int, block_size: int, asked_blocks: int
) -> MemoryPlan:
    """Divide `budget` bytes. `asked_len` and `asked_blocks` are the user's (0: decide); `model_len` the model's limit.

    Raises Refused with the missing bytes when a single sequence of the asked length does not fit."""
    limit = model_len or UNSTATED
    _sensible(asked_len, limit, asked_blocks, block_size)
    states = needs.per_sequence * max_num_seqs
    left = budget - needs.weights - needs.activations - states
    block = needs.per_token * block_size
    least = asked_blocks or -(-max(asked_len, SHORTEST) // block_size)
    if least * block > left:
        raise Refused(
            f"a context of {asked_len} tokens does not fit" if asked_len else "the model does not fit into memory",
            _missing(needs, budget, states, least * block_size),
            "lower --max-model-len, --max-num-seqs or --num-blocks, or raise the share of memory dz may use",
            code="no_memory",
        )
    length = asked_len or limit
    blocks = asked_blocks or _blocks(left, block, length * max_num_seqs, block_size)
    length = min(length, blocks * block_size)
    rows = (
        MemoryRow(name="weights", bytes=needs.weights, note="as the model holds them"),
        MemoryRow(
            name="cache blocks",
            bytes=blocks * block,
            note=f"{blocks} blocks of {block_size} tokens, {needs.per_token} B a token ({needs.measured})",
        ),
        MemoryRow(name="state slots", bytes=states, note=f"{max_num_seqs} sequences, {needs.per_sequence} B each"),
        MemoryRow(name="activations", bytes=needs.activations, note="one full step, estimated"),
        MemoryRow(name="left over", bytes=left - blocks * block, note=f"of {budget} B that dz may use"),
    )
    return MemoryPlan(rows=rows, blocks=blocks, slots=max_num_seqs, max_model_len=length)


def _sensible(asked_len: int, limit: int, asked_blocks: int, block_size: int) -> None:
    if asked_len > limit:
        raise Refused(
            f"--max-model-len {asked_len}",
            f"the model's own limit is {limit} tokens",
            f"ask for at most {limit}",
            code="too_long",
        )
    if 0 < asked_len < SHORTEST:
        raise Refused(
            f"--max-model-len {asked_len}",
            f"a prompt and its answer take at least {SHORTEST} tokens",
            "ask for more, or leave it out",
            code="too_short",
        )
    fits = asked_blocks * block_size
    if asked_blocks and fits < max(asked_len, SHORTEST):
        raise Refused(
            f"a context of {max(asked_len, SHORTEST)} tokens does not fit",
            f"--num-blocks {asked_blocks} of {block_size} tokens hold {fits} tokens",
            "raise --num-blocks or lower --max-model-len",
            code="no_memory",
        )


def _blocks(left: int, block: int, tokens: int, block_size: int) -> int:
    wanted = -(-tokens // block_size)
    return wanted if block == 0 else max(0, min(wanted, left // block))


def _missing(needs: Needs, budget: int, states: int, tokens: int) -> str:
    need = needs.weights + needs.activations + states + tokens * needs.per_token
    return (
        f"weights {needs.weights:,} B, activations {needs.activations:,} B, state slots {states:,} B and "
        f"{tokens:,} tokens of cache need {need:,} B, dz may use {budget:,} B: {max(0, need - budget):,} B are missing"
    )
