"""Tiles of rows that are sorted by group, found on the device: no host ever reads the offsets."""

# Triton's own types are not those that its functions see:

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def group_tiles(offsets, n_rows, groups, across, ROWS: tl.constexpr, WIDE: tl.constexpr):
    """(tiles before each group, tiles of each group, their number): `across` columns of tiles of ROWS rows; group
    number `groups` holds the rows from the last offset on. WIDE is a power of two above `groups`."""
    group = tl.arange(0, WIDE)
    first = tl.load(offsets + group, mask=group <= groups, other=n_rows)
    last = tl.load(offsets + group + 1, mask=group < groups, other=n_rows)
    tiles = tl.cdiv(last - first, ROWS) * across
    return tl.cumsum(tiles, 0) - tiles, tiles, tl.sum(tiles, 0)


@triton.jit
def find_tile(
    tile, before, tiles, offsets, n_rows, groups, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """(group, its first row in this tile, the end of its rows, the column of tiles); rows of a group vary fastest, so
    that programs side by side share its columns."""
    group = tl.arange(0, WIDE)
    g = tl.max(tl.where((before <= tile) & (tiles > 0), group, 0), 0)
    at = tile - tl.max(tl.where(group == g, before, 0), 0)
    start = tl.load(offsets + g)
    end = n_rows
    if g < groups:
        end = tl.load(offsets + g + 1)
    down = tl.cdiv(end - start, ROWS)
    return g, start + at % down * ROWS, end, at // down
