"""The one sink for everything a command says.

stdout carries the answer and nothing else: a table, lines, one result, or with --json exactly one document. Notes,
warnings, hints, progress and errors go to stderr. A command says everything once, whatever the mode:

    out = output.get()
    progress = out.progress()                    # hand this to the function that does the work
    out.document(envelope("plan", plan))         # printed with --json only
    out.table(("SITE", "OP", "N"), rows)         # not with --json or -q
    out.line("12 sites known")                   # not with --json or -q
    out.result(path, f"plan -> {path}")          # -q: the bare value alone; not with --json
    out.note("weights are random")               # stderr
    out.hint("dz accept org/name")               # stderr
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TextIO

from dz.cli import tables
from dz.cli.progress import Live, Plain
from dz.core import jsonio
from dz.core.protocols import Progress, Silent
from dz.errors import DzError

Color = Literal["auto", "always", "never"]


@dataclass(slots=True)
class Out:
    """Where output goes and in which form. Commands get theirs from `get()`; tests make their own.

    `json`: one document on stdout. `quiet`: bare values on stdout, and of the rest only warnings and errors.
    `verbose`: 1 logs at INFO, 2 at DEBUG with tracebacks. `color` as on the command line."""

    json: bool = False
    quiet: bool = False
    verbose: int = 0
    color: Color = "auto"
    stdout: TextIO | None = None
    stderr: TextIO | None = None
    documents: int = 0
    beside: dict[str, Any] = field(default_factory=dict)

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """A table of the answer. Columns that hold only numbers are set to the right; status words are coloured."""
        if not (self.json or self.quiet):
            stream = self.stdout or sys.stdout
            self._write(stream, tables.render(columns, rows, width=tables.width(stream), color=self._colored(stream)))

    def line(self, text: str) -> None:
        """One line of the answer."""
        if not (self.json or self.quiet):
            self._write(self.stdout or sys.stdout, f"{text}\n")

    def result(self, value: object, text: str | None = None) -> None:
        """The answer in one value: `text` (default: the value) for people, the bare value with -q."""
        if not self.json:
            self._write(self.stdout or sys.stdout, f"{value if self.quiet or text is None else text}\n")

    def document(self, doc: Mapping[str, Any]) -> None:
        """The answer as a JSON document in its envelope; printed with --json only.

        Raises RuntimeError for a second one: a reader is promised exactly one."""
        if not self.json:
            return
        if self.documents:
            raise RuntimeError("a command prints exactly one JSON document")
        self.documents += 1
        self._write(self.stdout or sys.stdout, jsonio.dumps({**doc, **self.beside}))

    def attach(self, name: str, value: Any) -> None:
        """Something that belongs beside the answer, whatever that will be: a key of the document, also on failure."""
        self.beside[name] = value

    def note(self, text: str) -> None:
        """A line worth reading that is not the answer."""
        if not self.quiet:
            self._write(self.stderr or sys.stderr, f"{text}\n")

    def hint(self, command: str) -> None:
        """What to run next."""
        if not (self.quiet or self.json):
            self._write(self.stderr or sys.stderr, f"hint: {command}\n")

    def warn(self, text: str) -> None:
        """Something that may surprise; said in every mode."""
        self._write(self.stderr or sys.stderr, self._paint("warning:", "yellow") + f" {text}\n")

    def error(self, error: DzError) -> None:
        """The three lines of an error on stderr; with --json its document on stdout, unless one is there already."""
        if self.json and not self.documents:
            self.document(error.data())
            return
        first, *rest = error.lines()
        word, _, what = first.partition(" ")
        self._write(self.stderr or sys.stderr, "\n".join([f"{self._paint(word, 'red')} {what}", *rest]) + "\n")

    def progress(self) -> Progress:
        """A Progress for the functions that do long work: a live bar on a terminal, plain lines anywhere else."""
        stream = self.stderr or sys.stderr
        if self.quiet:
            return Silent()
        quiet_env = any(os.environ.get(name) for name in ("CI", "NO_PROGRESS"))
        if stream.isatty() and not self.json and not quiet_env:
            return Live(stream, color=self._colored(stream))
        return Plain(lambda text: self._write(stream, f"{text}\n"))

    def _paint(self, text: str, color: str) -> str:
        return tables.paint(text, color) if self._colored(self.stderr or sys.stderr) else text

    def _colored(self, stream: TextIO) -> bool:
        """--color, then NO_COLOR, then FORCE_COLOR, then whether a terminal reads it."""
        if self.color != "auto":
            return self.color == "always"
        if os.environ.get("NO_COLOR"):
            return False
        return bool(os.environ.get("FORCE_COLOR")) or stream.isatty()

    def _write(self, stream: TextIO, text: str) -> None:
        """Write at once. A reader that went away (`dz ls | head`) ends the talking, not the command: its exit code
        still tells what happened."""
        try:
            stream.write(text)
            stream.flush()
        except BrokenPipeError:
            with Path(os.devnull).open("w") as sink:
                os.dup2(sink.fileno(), stream.fileno())


_current = Out()


def get() -> Out:
    """The output of this invocation."""
    return _current


def use(out: Out) -> Out:
    """Make `out` the output of this invocation; returns it."""
    global _current
    _current = out
    return out
