"""Settings with their origins: flag > DZ_* > project dz.toml > user config > recipe `prefer` > default."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dz.errors import UsageError


@dataclass(frozen=True, slots=True)
class Spec:
    """One setting: name as on the command line with underscores, its type, default and help; for numbers the smallest
    and the largest value that makes sense."""

    name: str
    type: type
    default: Any
    help: str
    low: float = 0
    high: float = float("inf")


SPECS: dict[str, Spec] = {
    s.name: s
    for s in (
        Spec("workspace", str, "reports", "where dz keeps locks, plans and reports"),
        Spec("device", str, "auto", "cpu, cuda, ... or auto"),
        Spec("dtype", str, "auto", "auto is the checkpoint's own"),
        Spec("max_model_len", int, 0, "longest context in tokens; 0: what model and memory allow"),
        Spec("max_num_seqs", int, 16, "most sequences in one step", 1),
        Spec("max_num_batched_tokens", int, 2048, "most tokens in one step; longer prompts are prefilled in chunks", 1),
        Spec("block_size", int, 16, "tokens of one cache block", 1),
        Spec("num_blocks", int, 0, "cache blocks; 0: from the memory plan"),
        Spec("gpu_memory_utilization", float, 0.9, "share of the device's memory that dz may use", 0.01, 1),
        Spec("cpu_memory_utilization", float, 0.5, "share of the host's free memory that dz may use on a CPU", 0.01, 1),
        Spec("host", str, "127.0.0.1", "address the server listens on"),
        Spec("port", int, 8000, "port the server listens on; 0: any free one", 0, 65535),
        Spec("max_restarts", int, 1, "how often a dead engine is started again"),
        Spec("hf_endpoint", str, "https://huggingface.co", "the hub"),
    )
}


@dataclass(frozen=True, slots=True)
class Value:
    """A setting's value and where it came from ("flag", "DZ_PORT", a file's path, "recipe NAME", "default")."""

    name: str
    value: Any
    origin: str


class Settings:
    """The resolved settings. `get(name)` gives the value; `values()` all of them with origins."""

    def __init__(self, values: dict[str, Value]) -> None:
        self._values = values

    def get(self, name: str) -> Any:
        """The value of a setting that SPECS knows."""
        return self._values[name].value

    def values(self) -> list[Value]:
        """Every setting, in the order of SPECS."""
        return [self._values[n] for n in SPECS]

    def with_recipe(self, name: str, wants: Mapping[str, Any]) -> Settings:
        """A copy in which a recipe's preferences replace defaults, and nothing else."""
        out = dict(self._values)
        for key, raw in wants.items():
            value = Value(key, _coerce(key, raw, f"recipe {name}"), f"recipe {name}")
            if out[key].origin == "default":
                out[key] = value
        return Settings(out)


def resolve(
    flags: Mapping[str, Any] | None = None,
    *,
    config: Path | None = None,
    no_config: bool = False,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> Settings:
    """Resolve all settings. `flags` holds what the user gave on the command line (None values are "not given").

    Raises UsageError for unknown names (with the nearest) and for values of the wrong type, naming their origin."""
    env = os.environ if env is None else env
    layers: list[tuple[str, Mapping[str, Any]]] = []
    if not no_config:
        user = Path(env.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "dz" / "config.toml"
        if user.is_file():
            layers.append((str(user), _read(user)))
        project = config or _project_file(cwd or Path.cwd())
        if config and not config.is_file():
            raise UsageError(
                f"no config file at {config}",
                "--config names a file that is not there",
                "leave --config out, or mend the path",
                code="no_config",
            )
        if project:
            layers.append((str(project), _read(project)))
    values = {s.name: Value(s.name, s.default, "default") for s in SPECS.values()}
    for origin, table in layers:
        for key, raw in table.items():
            name = key.replace("-", "_")
            values[name] = Value(name, _coerce(name, raw, origin), origin)
    for name in SPECS:
        var = f"DZ_{name.upper()}"
        if env.get(var):
            values[name] = Value(name, _coerce(name, env[var], var), var)
    if env.get("HF_ENDPOINT") and values["hf_endpoint"].origin == "default":
        values["hf_endpoint"] = Value("hf_endpoint", env["HF_ENDPOINT"].rstrip("/"), "HF_ENDPOINT")
    for name, raw in (flags or {}).items():
        if raw is not None:
            values[name] = Value(name, _coerce(name, raw, "flag"), "flag")
    return Settings(values)


def _project_file(start: Path) -> Path | None:
    for folder in (start, *start.parents):
        if (folder / "dz.toml").is_file():
            return folder / "dz.toml"
    return None


def _read(path: Path) -> Mapping[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise UsageError(
            f"{path} is not valid TOML", str(e), "mend the file, or use --no-config", code="bad_toml"
        ) from e


def _coerce(name: str, raw: Any, origin: str) -> Any:
    spec = SPECS.get(name)
    if spec is None:
        near = difflib.get_close_matches(name, list(SPECS), 1)
        raise UsageError(
            f"unknown setting '{name}' from {origin}",
            f"did you mean '{near[0]}'?" if near else "no setting is near that name",
            "dz config show",
            code="unknown_setting",
        )
    try:
        if isinstance(raw, bool) or (spec.type is int and isinstance(raw, float)):
            raise ValueError
        value = _tokens(raw) if name == "max_model_len" and isinstance(raw, str) else spec.type(raw)
        if not isinstance(value, str) and not spec.low <= value <= spec.high:
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        limits = "" if spec.type is str else f" of at least {spec.low:g}"
        limits += f" and at most {spec.high:g}" if spec.high != float("inf") else ""
        what, why = f"{name} = {raw!r} from {origin}", f"it takes {spec.type.__name__}{limits}"
        raise UsageError(what, why, "dz config show", code="bad_setting") from None
    return value


def _tokens(text: str) -> int:
    """A token count as people write it: 4096, 4k (4000), 4K (4096), 1M."""
    scale = {"k": 1000, "K": 1024, "m": 10**6, "M": 1024**2}.get(text[-1:], 1)
    return int(float(text[:-1]) * scale) if scale > 1 else int(text)
