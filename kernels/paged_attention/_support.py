"""What the techniques of paged attention take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dz.core.kernel import Support
from dz.kernels.common.parts import HALVES
from dz.kernels.common.refuse import dtypes, one_device, same_dtype, support, unknown

TABLES = ("block_table", "kv_lengths", "cu_q")
NAMES = ("q", "k_cache", "v_cache", *TABLES, "scale", "window", "sinks", "softcap")


def supports(args: Mapping[str, Any]) -> Support:
    """Head sizes that are powers of two from 16 to 256; whole groups of up to 128 heads; rows without gaps inside."""
    q, k, sinks = args["q"], args["k_cache"], args.get("sinks")
    dim, heads, groups = q.shape[-1], q.shape[1], k.shape[2]
    loose = [name for name in ("q", "k_cache", "v_cache", "block_table") if args[name].stride(-1) != 1]
    gaps = [name for name in ("kv_lengths", "cu_q", "sinks") if name in args and args[name] is not None]
    loose += [name for name in gaps if not args[name].is_contiguous()]
    window, softcap = args.get("window"), args.get("softcap")
    return support(
        unknown(args, NAMES),
        dtypes(args, ("q", "k_cache", "v_cache"), HALVES),
        dtypes(args, TABLES, ("int32",)),
        dtypes(args, ("sinks",), ("float32",)),
        same_dtype(args, ("q", "k_cache", "v_cache")),
        one_device(args),
        f"head size {dim}; takes powers of two from 16 to 256" if not 16 <= dim <= 256 or dim & (dim - 1) else "",
        f"values of {args['v_cache'].shape[-1]} for keys of {dim}" if args["v_cache"].shape[-1] != dim else "",
        f"{heads} heads on {groups} key heads" if heads % groups or heads // groups > 128 else "",
        f"{' and '.join(loose)} with gaps" if loose else "",
        f"a window of {window}" if window is not None and window < 1 else "",
        f"a softcap of {softcap}" if softcap is not None and softcap <= 0 else "",
        "a batch of more than 16384" if args["block_table"].shape[0] > 16384 else "",
        "sinks of another length" if sinks is not None and sinks.shape[0] != heads else "",
    )
