"""The pictures of the image check: deterministic, of different sizes, told apart by any vision tower."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

SIZES = ((96, 64, 3), (80, 144, 5), (64, 64, 11))  # width, height, a number that sets the pattern


def draw(folder: Path) -> list[Path]:
    """Write the pictures as PNG files into `folder`, once; returns their absolute paths."""
    from PIL import Image

    out = []
    for i, (width, height, k) in enumerate(SIZES):
        path = (folder / f"picture{i}.png").absolute()
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            image = Image.new("RGB", (width, height))
            image.putdata([_pixel(x, y, k) for y in range(height) for x in range(width)])
            image.save(path)
        out.append(path)
    return out


def _pixel(x: int, y: int, k: int) -> tuple[int, int, int]:
    checks = ((x // 8 + y // 8) % 2) * 200 + 20
    return (x * k * 7) % 256, (y * 11 + x * k) % 256, checks


def conversations(pictures: list[Path]) -> dict[str, list[dict[str, Any]]]:
    """The cases: messages whose image parts name files. Orders, places and counts differ; two of them differ in
    nothing but the picture's pixels or the pictures' order."""
    a, b, c = ({"type": "image", "path": str(p)} for p in pictures)

    def text(words: str) -> dict[str, Any]:
        return {"type": "text", "text": words}

    cases = {
        "one": [text("Look: "), a, text(" What is this?")],
        "another": [text("Look: "), b, text(" What is this?")],
        "alone": [c],
        "two": [text("Look: "), a, text(" and "), b, text(" What differs?")],
        "swapped": [text("Look: "), b, text(" and "), a, text(" What differs?")],
        "behind": [text("Describe in one sentence, plainly and without guessing, what you see here: "), c],
    }
    return {name: [{"role": "user", "content": content}] for name, content in cases.items()}


def as_urls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages as clients send them: image parts as data URLs."""

    def part(p: dict[str, Any]) -> dict[str, Any]:
        if p["type"] != "image":
            return p
        data = base64.b64encode(Path(p["path"]).read_bytes()).decode()
        return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}

    return [{**m, "content": [part(p) for p in m["content"]]} for m in messages]
