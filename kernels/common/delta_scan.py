"""The walk of a delta rule's state over the chunks of a sequence, and how long sequences are split for it.

What a chunk of 64 tokens does to the state is affine: `S' = (D - Kg^T W) S + Kg^T U`. Chunks come as tiles of a
workspace (`Tiles`). A sequence is cut into pieces; all pieces at once find their own `S' = M S + B` (`_scan` from zero
and from the identity), `_join` chains them, and all pieces at once walk again from their true start and write the
output. States are held transposed, [V, K], so that they are the left operand of every product and stay in registers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dz.kernels.common.launch import on
from dz.kernels.common.tuned import processors

CHUNK = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """How tokens lie: `batch` rows of `tokens`, or one row of packed sequences with bounds `cu` [sequences + 1]."""

    batch: int
    tokens: int
    cu: Tensor | None

    @property
    def sequences(self) -> int:
        """Number of sequences."""
        return self.batch if self.cu is None else len(self.cu) - 1

    @property
    def chunks(self) -> int:
        """Chunks in all, at most: the lengths of packed sequences are known on the device only."""
        if self.cu is None:
            return self.batch * triton.cdiv(self.tokens, CHUNK)
        return self.tokens // CHUNK + self.sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Per chunk and head, with keys k and queries q under their decays (bf16; G is the running sum of log decays):
    w = T beta k e^G [64, K], u = (T beta v)^T [V, 64], q = q e^G [64, K], k = k e^(G_end - G) [64, K], inner [64, 64]
    what a query reads of its own chunk, decay = e^G_end [K] fp32; T is the inverse of the chunk's triangle."""

    w: Tensor
    u: Tensor
    q: Tensor
    k: Tensor
    inner: Tensor
    decay: Tensor

    @staticmethod
    def empty(chunks: int, heads: int, dim: int, dim_v: int, device: torch.device) -> Tiles:
        """Room for so many chunks; `dim` and `dim_v` as the kernels hold them."""

        def room(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.empty((chunks, heads, *shape), dtype=dtype, device=device)

        keys = (CHUNK, dim)
        return Tiles(
            w=room(*keys), u=room(dim_v, CHUNK), q=room(*keys), k=room(*keys), inner=room(CHUNK, CHUNK),
            decay=room(dim, dtype=torch.float32),
        )  # fmt: skip


@triton.jit
def span(row, cu, sequences, tokens, PACKED: tl.constexpr, MANY: tl.constexpr):
    """(first token, end, first chunk) of a sequence, counted over all of them; in a batch tokens count per row."""
    if PACKED:
        i = tl.arange(0, MANY)
        ahead = i < row
        a = tl.load(cu + i, mask=ahead, other=0)
        b = tl.load(cu + i + 1, mask=ahead, other=0)
        base = tl.sum((b - a + 63) // 64, 0)
        return tl.cast(tl.load(cu + row), tl.int32), tl.cast(tl.load(cu + row + 1), tl.int32), tl.cast(base, tl.int32)
    return 0, tokens, row * ((tokens + 63) // 64)


@triton.jit
def sequence_of(chunk, cu, sequences, tokens, PACKED: tl.constexpr, MANY: tl.constexpr):
    """The sequence that a chunk belongs to; `sequences` for one past the last."""
    if PACKED:
        i = tl.arange(0, MANY)
        a = tl.load(cu + i, mask=i < sequences, other=0)
        b = tl.load(cu + i + 1, mask=i < sequences, other=0)
        ends = tl.cumsum((b - a + 63) // 64, 0)
        return tl.sum(((ends <= chunk) & (i < sequences)).to(tl.int32), 0)
    return chunk // ((tokens + 63) // 64)


@triton.jit
def _scan(
    w, u, q, k, inner, decay, start, out, end, cu, sequences, tokens, heads, pieces, dim, dim_v,
    s_n, s_p, s_h, s_v, s_k, e_n, e_p, e_h, e_v, e_k,
    K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, OUT: tl.constexpr, START: tl.constexpr, KEEP: tl.constexpr,
    PACKED: tl.constexpr, MANY: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    row, piece = tl.program_id(2) // pieces, tl.program_id(2) % pieces
    first, last, base = span(row, cu, sequences, tokens, PACKED, MANY)
    chunks = (last - first + 63) // 64
    each = (chunks + pieces - 1) // pieces
    begin, stop = tl.minimum(piece * each, chunks), tl.minimum(piece * each + each, chunks)
    r, c, t = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, K), tl.arange(0, 64)
    inside = (r[:, None] < dim_v) & (c[None, :] < dim)
    s = tl.zeros((ROWS, K), tl.float32)
    if START:
        at = tl.cast(row, tl.int64) * s_n + tl.cast(piece, tl.int64) * s_p + head * s_h + r[:, None] * s_v
        s += tl.load(start + at + c[None, :] * s_k, mask=inside, other=0.0)
    if not OUT:  # the rows after V start as the identity, to find what the piece does to any state
        s += tl.where(r[:, None] - V == c[None, :], 1.0, 0.0)
    tile = tl.cast(base + begin, tl.int64) * heads + head
    keys, own = t[:, None] * K + c[None, :], t[:, None] * 64 + t[None, :]
    mine = r[:, None] * 64 + t[None, :]
    at_out = out + (tl.cast(row, tl.int64) * (0 if PACKED else tokens) * heads + head) * dim_v + r[:, None]
    for i in tl.range(begin, stop, num_stages=STAGES):
        low = s.to(tl.bfloat16)
        new = tl.load(u + tile * (64 * V) + mine, mask=(r < V)[:, None], other=0.0).to(tl.float32)
        new -= tl.dot(low, tl.trans(tl.load(w + tile * (64 * K) + keys)))
        new_low = new.to(tl.bfloat16)
        if OUT:
            o = tl.dot(low, tl.trans(tl.load(q + tile * (64 * K) + keys)))
            o = tl.dot(new_low, tl.trans(tl.load(inner + tile * 4096 + own)), o)
            token = first + i * 64 + t[None, :]
            to = at_out + tl.cast(token, tl.int64) * heads * dim_v
            tl.store(to, o.to(out.dtype.element_ty), mask=(token < last) & (r[:, None] < dim_v))
        s *= tl.load(decay + tile * K + c)[None, :]
        s = tl.dot(new_low, tl.load(k + tile * (64 * K) + keys), s)
        tile += heads
    if KEEP:
        at = tl.cast(row, tl.int64) * e_n + tl.cast(piece, tl.int64) * e_p + head * e_h + r[:, None] * e_v
        if OUT:  # the last piece ends where the sequence does
            inside = (r[:, None] < tl.where(piece + 1 == pieces, dim_v, 0)) & (c[None, :] < dim)
            tl.store(end + at + c[None, :] * e_k, s, mask=inside)
        else:
            tl.store(end + at + c[None, :] * e_k, s)


@triton.jit
def _join(
    start, own, starts, heads, pieces, dim, dim_v, s_n, s_h, s_v, s_k,
    K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, START: tl.constexpr,
):  # fmt: skip
    head, row = tl.program_id(1), tl.cast(tl.program_id(2), tl.int64)
    r, c = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, K)
    s = tl.zeros((ROWS, K), tl.float32)
    if START:
        at = row * s_n + head * s_h + r[:, None] * s_v + c[None, :] * s_k
        s += tl.load(start + at, mask=(r[:, None] < dim_v) & (c[None, :] < dim), other=0.0)
    for piece in range(pieces):
        place = (row * pieces + piece) * heads + head
        tl.store(starts + place * (V * K) + r[:, None] * K + c[None, :], s)
        if piece + 1 < pieces:
            found = own + place * ((V + K) * K)
            b = tl.load(found + r[:, None] * K + c[None, :])
            m = tl.load(found + (V + tl.arange(0, K))[:, None] * K + c[None, :])
            s_high, m_high = s.to(tl.bfloat16), m.to(tl.bfloat16)  # three products of halves: 16 bits of each are kept
            s_low, m_low = (s - s_high.to(tl.float32)).to(tl.bfloat16), (m - m_high.to(tl.float32)).to(tl.bfloat16)
            s = tl.dot(s_high, m_low, b)
            s = tl.dot(s_low, m_high, s)
            s = tl.dot(s_high, m_high, s)


def pieces_for(lengths: Lengths, heads: int, device: torch.device) -> int:
    """Into how many pieces a sequence is cut: as many as there are processors for, of no fewer than 8 chunks."""
    longest = triton.cdiv(lengths.tokens, CHUNK) if lengths.cu is None else lengths.chunks // lengths.sequences
    return max(1, min(processors(device) // max(1, lengths.sequences * heads), longest // 8))


def scan(
    tiles: Tiles, lengths: Lengths, state: Tensor | None, out: Tensor, new: Tensor | None, dim: int,
    cfg: dict[str, int],
) -> None:  # fmt: skip
    """Walk all sequences: `state` [N, H, K, V] or None for zeros, `out` [B, T, H, V] and `new` [N, H, K, V] written.
    `cfg`: rows of the state a program holds, its warps and stages, and those of the walk without output."""
    n, heads, device = lengths.sequences, out.shape[2], out.device
    V, K = tiles.u.shape[2], tiles.w.shape[3]
    many = triton.next_power_of_2(n + 1)
    packed = {"PACKED": lengths.cu is not None, "MANY": many}
    pieces = cfg.get("pieces") or pieces_for(lengths, heads, device)
    data = (tiles.w, tiles.u, tiles.q, tiles.k, tiles.inner, tiles.decay)
    sizes = (n, lengths.tokens, heads, pieces, dim, out.shape[3])
    rows = min(cfg["rows"], V)
    start, places = state, _places(state)
    with on(out):
        if pieces > 1:
            own = torch.empty((n, pieces, heads, V + K, K), dtype=torch.float32, device=device)
            r = min(cfg["own_rows"], V, K)
            _scan[(V // r + K // r, heads, n * pieces)](
                *data, out, out, own, lengths.cu, *sizes, *(0,) * 5, *own.stride(), K=K, V=V, ROWS=r, OUT=False,
                START=False, KEEP=True, **packed, STAGES=cfg["own_stages"], num_warps=cfg["own_warps"],
            )  # fmt: skip
            start = torch.empty((n, pieces, heads, V, K), dtype=torch.float32, device=device)
            r = min(64, V)
            _join[(V // r, heads, n)](
                state, own, start, heads, pieces, dim, out.shape[3], places[0], *places[2:], K=K, V=V, ROWS=r,
                START=state is not None, num_warps=8,
            )  # fmt: skip
            places = start.stride()
        _scan[(V // rows, heads, n * pieces)](
            *data, start, out, new, lengths.cu, *sizes, *places, *_places(new), K=K, V=V, ROWS=rows, OUT=True,
            START=start is not None, KEEP=new is not None, **packed, STAGES=cfg["stages"], num_warps=cfg["warps"],
        )  # fmt: skip


def _places(state: Tensor | None) -> tuple[int, int, int, int, int]:
    """Strides by sequence, piece, head, value and key of a state [N, H, K, V]."""
    if state is None:
        return 0, 0, 0, 0, 0
    n, h, k, v = state.stride()
    return n, 0, h, v, k
