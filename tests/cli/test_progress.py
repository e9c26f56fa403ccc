"""Progress: plain lines, thirty-second lines, live bars."""

import io
import threading

import pytest

from dz.cli.progress import Live, Plain, amount, pace, size


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (1536, "1.5 kB"),
        (123_456, "123 kB"),
        (5_000_000_000, "5.0 GB"),
        (1.56e12, "1.6 TB"),
    ],
)
def test_size(n, text):
    assert size(n) == text


def test_amount():
    assert amount(12345, "tokens") == "12,345 tokens"
    assert amount(12345, "") == "12,345"
    assert amount(1500, "B") == "1.5 kB" == amount(1500, "bytes")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_plain_lines():
    said, clock = [], Clock()
    p = Plain(said.append, clock)
    p.start("download", 4_000_000, "B")
    for clock.now in (1.0, 29.9, 30.0, 31.0, 61.0):
        p.advance(500_000)
    p.note("one file was there")
    clock.now = 62.5
    p.finish("5 files")
    assert said == [
        "download (4.0 MB)",
        "download: 1.5 MB of 4.0 MB, 30 s, 50.0 kB/s, 50 s left",
        "download: 2.5 MB of 4.0 MB, 61 s, 41.0 kB/s, 37 s left",
        "one file was there",
        "download: done in 62.5 s (5 files)",
    ]


def test_time_left_in_the_unit_people_read():
    assert pace(10, 100, 10) == ", 1 B/s, 90 s left" and pace(10, None, 10) == ", 1 B/s"
    assert pace(0, 100, 10) == pace(5, 100, 0) == ""
    assert pace(10**9, 10**12, 5) == ", 200 MB/s, 83 min left" and pace(10**9, 10**13, 5).endswith("13.9 h left")


def test_plain_counts_other_things_without_a_rate():
    said, clock = [], Clock()
    p = Plain(said.append, clock)
    p.start("headers", 96, "files")
    clock.now = 30.0
    p.advance(40)
    assert said[-1] == "headers: 40 files of 96 files, 30 s"


def test_plain_without_a_total():
    said = []
    p = Plain(said.append, Clock())
    p.start("look")
    p.finish()
    assert said == ["look", "look: done in 0.0 s"]


def test_plain_from_threads():
    clock, said = Clock(), []
    p = Plain(said.append, clock)
    p.start("load", 4000, "B")
    threads = [threading.Thread(target=lambda: [p.advance() for _ in range(1000)]) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    clock.now = 31
    p.advance(0)
    assert said[-1] == "load: 4.0 kB of 4.0 kB, 31 s, 129 B/s"


def test_live_leaves_one_line_a_step():
    stream = io.StringIO()
    p = Live(stream, color=False)
    for name, unit in (("download", "B"), ("layers", "")):
        p.start(name, 10, unit)
        p.advance(4)
        p.note("[a note] in between")
        p.finish("fine")
    text = stream.getvalue()
    assert text.count("[a note] in between") == 2
    assert "download: done in " in text and "layers: done in " in text and text.endswith("(fine)\n")
