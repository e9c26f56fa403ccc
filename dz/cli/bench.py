"""`dz bench`: times of kernels, beside their floors and their peers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dz.cli import output
from dz.core.envelope import envelope
from dz.errors import Refused

Ops = Annotated[
    list[str] | None, typer.Argument(metavar="[OP]...", help="Ops to measure; all that have a bench if none.")
]
DeviceOption = Annotated[str, typer.Option("--device", metavar="DEVICE", help="auto, cuda, cpu, ...")]
Tiny = Annotated[bool, typer.Option("--tiny", help="The smallest shapes and the references: runs anywhere.")]
Only = Annotated[str, typer.Option("--only", metavar="TEXT", help="Shapes whose name contains TEXT.")]
NoPeers = Annotated[bool, typer.Option("--no-peers", help="Measure only what dz has.")]
Write = Annotated[Path | None, typer.Option("--output", metavar="FILE", help="Also write the document here.")]
Keep = Annotated[
    list[str] | None, typer.Option("--keep", metavar="BUCKET=SHAPE", help="Write the fastest to tuned.json.")
]
Noise = Annotated[float, typer.Option("--noise", min=0.0, max=1.0, help="Differences up to this share are noise.")]


def register(app: typer.Typer) -> None:
    """Add the group."""
    group = typer.Typer()
    group.callback(invoke_without_command=True)(bench)
    group.command("ops")(ops)
    group.command("compare")(compare)
    group.command("tune")(tune)
    app.add_typer(group, name="bench")


def bench(context: typer.Context) -> None:
    """Measure kernels: time, floor, peers and error in one run."""
    if context.invoked_subcommand is None:
        ops()


def ops(
    names: Ops = None,
    device: DeviceOption = "auto",
    tiny: Tiny = False,
    only: Only = "",
    no_peers: NoPeers = False,
    write: Write = None,
) -> int:
    """Measure ops on the shapes that the recipes name.

    Examples:
      dz bench ops
      dz bench ops index_topk --only 128k
      dz bench ops --tiny --device cpu

    Exit 1 when a kernel fails or is out of tolerance."""
    from dz.bench.ops import bench_ops
    from dz.core import jsonio

    out = output.get()
    result = bench_ops(names or (), device=device, tiny=tiny, only=only, peers=not no_peers, progress=out.progress())
    bad = [f"{r.op} {r.shape} {r.impl}: {r.reason or 'out of tolerance'}" for r in result.rows if _is_bad(r)]
    document = envelope("bench", result, inputs={"ops": names or []}, status="fail" if bad else "ok", reasons=bad)
    if write is not None:
        jsonio.write(write, document)
    out.document(document)
    out.line(f"{result.device}: copy {result.ceilings.bandwidth / 1e12:.2f} TB/s, " + _rates(result.ceilings.flops))
    out.table(
        ("OP", "SHAPE", "IMPL", "US", "FLOOR", "OF FLOOR", "BOUND", "ERROR", "NOTE"), [_cells(r) for r in result.rows]
    )
    out.result(len(bad), f"{len(result.rows)} rows, {len(bad)} failed")
    return Refused.exit_code if bad else 0


def compare(old: Path, new: Path, noise: Noise = 0.05) -> int:
    """Set two documents of `dz bench ops` side by side.

    Examples:
      dz bench compare reports/bench/a.json reports/bench/b.json

    Exit 1 when a row is slower beyond the noise, or wrong."""
    from dz.bench.compare import compare as changes_of
    from dz.core import jsonio

    out = output.get()
    changes = changes_of(jsonio.read(old), jsonio.read(new), noise=noise)
    bad = [
        f"{c.op} {c.shape} {c.impl}: {c.verdict}, {c.ratio:.2f}x" for c in changes if c.verdict in ("slower", "wrong")
    ]
    status = "fail" if bad else "ok"
    out.document(
        envelope(
            "bench_compare", {"changes": changes}, inputs={"old": str(old), "new": str(new)}, status=status, reasons=bad
        )
    )
    cells = [
        (c.op, c.shape, c.impl, f"{c.old_us:.1f}", f"{c.new_us:.1f}", f"{c.ratio:.2f}", c.verdict) for c in changes
    ]
    out.table(("OP", "SHAPE", "IMPL", "OLD US", "NEW US", "RATIO", "VERDICT"), cells)
    out.result(len(bad), f"{len(changes)} rows, {len(bad)} worse")
    return Refused.exit_code if bad else 0


def tune(kernel: str, device: DeviceOption = "auto", only: Only = "", keep: Keep = None, write: Write = None) -> int:
    """Try the launch configurations that KERNEL (op/technique) lists.

    Examples:
      dz bench tune index_topk/triton --keep default=r4096_128k"""
    from dz.backends import detect
    from dz.bench import tune as tuning
    from dz.core import jsonio

    out = output.get()
    trials = tuning.tune(kernel, device=device, only=only, progress=out.progress())
    document = envelope("bench_tune", {"device": detect(device).name, "trials": trials}, inputs={"kernel": kernel})
    if write is not None:
        jsonio.write(write, document)
    out.document(document)
    ordered = sorted(trials, key=lambda t: (t.shape, t.bucket, not t.median_us, t.median_us))
    cells = [
        (t.shape, t.bucket, f"{t.median_us:.1f}", " ".join(f"{k}={v}" for k, v in t.config.items()), t.reason)
        for t in ordered
    ]
    out.table(("SHAPE", "BUCKET", "US", "CONFIG", "NOTE"), cells)
    if keep:
        path = tuning.keep(trials, detect(device).name, {k.partition("=")[0]: k.partition("=")[2] for k in keep})
        out.note(f"kept in {path}")
    out.result(len(trials), f"{len(trials)} trials")
    return 0


def _is_bad(row) -> bool:  # noqa: ANN001  a Row; importing it here would import torch
    ours = not row.impl.startswith("peer:")
    return ours and (row.status == "failed" or (row.error is not None and not row.error.ok))


def _cells(row) -> tuple[str, ...]:  # noqa: ANN001
    note = row.reason or ", ".join(f"{k}: {v:g}" for k, v in row.recorded_us.items())
    error = "" if row.error is None else ("exact" if row.error.rel == 0 else f"{row.error.rel:.1e}")
    error += "" if row.error is None or row.error.ok else " WRONG"
    if row.status != "measured":
        return row.op, row.shape, row.impl, row.status, f"{row.floor_us:.1f}", "", row.bound, error, note
    share = f"{100 * row.of_floor:.0f}%"
    return row.op, row.shape, row.impl, f"{row.median_us:.1f}", f"{row.floor_us:.1f}", share, row.bound, error, note


def _rates(flops: dict[str, float]) -> str:
    return ", ".join(f"{name} {rate / 1e12:.1f} TFLOP/s" for name, rate in flops.items())
