"""Recognise attention behind upstream's interface, low-rank attention, and short causal convolutions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dz.core.inventory import Match, SiteView
from dz.ops._forward import Facts, facts
from dz.ops._probe import conv_function

# What the op's own arguments express; `dropout` is zero in evaluation.
_EXPRESSED = {
    *("dropout", "scaling", "sliding_window", "s_aux", "softcap", "position_ids", "attention_mask", "is_causal"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
}
# Arguments of a module that attends within the parts of a packed row; the op's `cu_q` and `cu_k` express them, and the
# angles of the positions are turned before the interface.
_PACKED = frozenset({"cu_seqlens", "max_seqlen", "rotary_pos_emb"})
_PICKS = {
    "indices": "a child picks the keys that each query sees",
    "block_indices": "a child picks the blocks of keys that each query sees",
}


def _seen(site: SiteView) -> Facts | None:
    if site.kind != "interface" or not isinstance(site.target, nn.Module):
        return None
    found = facts(site.target)
    return found if found is not None and found.interface else None


def low_rank(module: nn.Module) -> tuple[int, int] | None:
    """(rank R, rotary width) of a low-rank key-value path: a projection to R + r channels, a norm over R of them, a
    projection from R; the query's path, which norms all it projects, is not one."""
    weights = [w for m in module.children() if isinstance(w := getattr(m, "weight", None), torch.Tensor)]
    linears = [w for w in weights if w.dim() == 2]
    norms = {w.shape[0] for w in weights if w.dim() == 1}
    found = []
    for down in linears:
        for up in linears:
            rank = up.shape[1]
            extra = down.shape[0] - rank
            if up is not down and rank in norms and 0 <= extra < rank and down.shape[1] > rank // 4:
                found.append((extra, rank))
    named = getattr(module, "kv_lora_rank", None)
    rotary = [(e, r) for e, r in found if (r == named if isinstance(named, int) else e > 0)]
    return (max(rotary)[1], max(rotary)[0]) if rotary else None


def _whole(owner: Any, *names: str) -> int | None:
    """The first of these attributes that is a whole number. A configuration whose layers differ refuses an answer for
    all of them: then there is none."""
    for name in names:
        try:
            value = getattr(owner, name, None)
        except (AttributeError, ValueError, RuntimeError, KeyError):
            continue
        if isinstance(value, int):
            return value
    return None


def _traits(site: SiteView, f: Facts) -> dict[str, Any]:
    m, config = site.target, site.config
    out: dict[str, Any] = {}
    groups = _whole(m, "num_key_value_groups")
    for name, places in (
        ("heads", ("num_heads", "num_attention_heads")),
        ("kv_heads", ("num_key_value_heads",)),
        ("head_dim", ("head_dim", "qk_head_dim")),
    ):
        if name == "kv_heads" and groups and "heads" in out and _whole(m, *places) is None:
            out[name] = out["heads"] // groups  # the module's own answer before the configuration's
            continue
        value = next((v for owner in (m, config) if (v := _whole(owner, *places)) is not None), None)
        if value is not None:
            out[name] = value
    scale = f.keywords.get("scaling")
    out["scale"] = scale if isinstance(scale, (int, float)) else None
    window = f.keywords.get("sliding_window")
    out["window"] = window if isinstance(window, int) else None
    softcap = f.keywords.get("softcap")
    out["softcap"] = softcap if isinstance(softcap, (int, float)) else None
    out["sinks"] = isinstance(f.keywords.get("s_aux"), torch.Tensor)
    return out


def _differences(f: Facts) -> list[str]:
    out = [_PICKS.get(k, f"passes {k}= to the attention function") for k in sorted(set(f.keywords) - _EXPRESSED)]
    out += [f"{c} receives the cache" for c in sorted(f.hands)]
    out += [f"reads .{a} of the cache" for a in sorted(f.reaches - {"update"}) if not a.startswith("__")]
    if f.mask_changed:
        out.append("changes its mask")
    packed = _PACKED if "cu_seq_lens_q" in f.keywords else frozenset()
    out += [f"takes {t}" for t in f.takes if t not in packed]
    return out


def attention(site: SiteView) -> Match | None:
    """A module that calls the attention interface with keys and values of its own heads."""
    f = _seen(site)
    if f is None or low_rank(site.target) is not None:
        return None
    traits = _traits(site, f) | {"causal": f.cache is not None or bool(getattr(site.target, "is_causal", False))}
    differs = _differences(f)
    extra = [
        w for w, on in (("window", traits["window"]), ("sinks", traits["sinks"]), ("softcap", traits["softcap"])) if on
    ]
    words = (
        f"softmax attention, {traits.get('heads', '?')} heads over {traits.get('kv_heads', traits.get('heads', '?'))}"
        + (f", {', '.join(extra)}" if extra else "")
    )
    return Match(
        op="attention", status="variant" if differs else "known", reason=words, differs=tuple(differs), traits=traits
    )


def mla(site: SiteView) -> Match | None:
    """A module that calls the attention interface with keys and values expanded from a low-rank latent."""
    f = _seen(site)
    rank = low_rank(site.target) if f is not None else None
    if f is None or rank is None:
        return None
    traits = _traits(site, f) | {"rank": rank[0], "rotary": rank[1]}
    differs = _differences(f)
    reason = f"low-rank attention, latent {rank[0]} + {rank[1]}"
    return Match(
        op="mla", status="variant" if differs else "known", reason=reason, differs=tuple(differs), traits=traits
    )


def causal_conv(site: SiteView, reference: Callable[..., Any]) -> Match | None:
    """A depthwise Conv1d padded on the left by its width less one, or a function that convolves so."""
    m = site.target
    if site.kind == "function":
        return conv_function(site, reference)
    if site.kind != "module" or not isinstance(m, nn.Conv1d):
        return None
    width, channels = m.kernel_size[0], m.in_channels
    traits = {"channels": channels, "width": width, "bias": m.bias is not None}
    differs = []
    if m.groups != channels or m.out_channels != channels:
        differs.append(f"{m.groups} groups for {channels} channels: not depthwise")
    if m.stride != (1,) or m.dilation != (1,):
        differs.append(f"stride {m.stride[0]}, dilation {m.dilation[0]}")
    if m.padding not in ((width - 1,), (0,)):
        differs.append(f"padding {m.padding}")
    status = "variant" if differs else "known"
    reason = f"depthwise, width {width}" if not differs else "a convolution over time"
    return Match(op="causal_conv", status=status, reason=reason, differs=tuple(differs), traits=traits)
