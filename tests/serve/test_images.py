"""Images in requests."""

import base64
import io
import struct
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from dz.serve.config import ImageLimits
from dz.serve.errors import ApiError
from dz.serve.images import image
from dz.serve.messages import convert
from dz.serve.protocol import Message

LIMITS = ImageLimits(bytes=100_000, pixels=10_000, count=2)


def data_url(picture, kind="PNG", **options):
    out = io.BytesIO()
    picture.save(out, kind, **options)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(out.getvalue()).decode()}"


def gradient(mode, size=(17, 9)):
    picture = Image.new("RGB", size)
    picture.putdata([(x * 9 % 256, y * 20 % 256, (x + y) % 256) for y in range(size[1]) for x in range(size[0])])
    return picture.convert(mode)


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P", "1", "LA", "I;16", "CMYK"])
def test_every_mode_becomes_rgb(mode):
    picture = gradient("L").convert("I").convert("I;16") if mode == "I;16" else gradient(mode)
    kind = "TIFF" if mode == "CMYK" else "PNG"
    got = image(data_url(picture, kind), LIMITS, "x")
    assert got.mode == "RGB"
    assert got.size == (17, 9)
    assert list(got.getdata()) == list(picture.convert("RGB").getdata())


@pytest.mark.parametrize("size", [(1, 1), (27, 29), (300, 2), (100, 100)])
def test_sizes(size):
    assert image(data_url(gradient("RGB", size)), LIMITS, "x").size == size


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_formats(kind):
    assert image(data_url(gradient("RGB"), kind), LIMITS, "x").size == (17, 9)


def test_exif_turns_the_picture():
    exif = Image.Exif()
    exif[0x0112] = 6
    assert image(data_url(gradient("RGB"), "JPEG", exif=exif), LIMITS, "x").size == (9, 17)


def test_unpadded_escaped_and_plain_data_urls():
    url = data_url(gradient("RGB"))
    assert image(url.rstrip("="), LIMITS, "x").size == (17, 9)
    assert image(url.replace("+", "%2B").replace("/", "%2F").replace("image%2F", "image/"), LIMITS, "x").size == (17, 9)
    raw = base64.b64decode(url.partition(",")[2])
    assert image("data:image/png," + "".join(f"%{b:02x}" for b in raw), LIMITS, "x").size == (17, 9)


def png(width, height):
    """A PNG that claims a size and holds one row."""

    def chunk(kind, data):
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    rows = zlib.compress(b"\0" + b"\0" * 3 * 4)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return "data:image/png;base64," + base64.b64encode(data + chunk(b"IDAT", rows) + chunk(b"IEND", b"")).decode()


BAD = {
    "http": ("http://127.0.0.1/a.png", "only data URLs"),
    "file": ("file:///etc/passwd", "only data URLs"),
    "path": ("/etc/passwd", "only data URLs"),
    "ftp": ("ftp://x/y", "only data URLs"),
    "number": (5, "needs a URL"),
    "none": (None, "needs a URL"),
    "empty": ("data:image/png;base64,", "cannot be read"),
    "not base64": ("data:image/png;base64,@@@@", "base64"),
    "text": ("data:text/plain;base64," + base64.b64encode(b"hello").decode(), "cannot be read"),
    "svg": ("data:image/svg+xml;base64," + base64.b64encode(b"<svg/>").decode(), "cannot be read"),
    "truncated": (data_url(gradient("RGB"))[:-60], "cannot be read"),
    "bytes": ("data:image/png;base64," + "A" * 200_000, "100,000 bytes"),
    "pixels": (png(101, 100), "101 x 100"),
    "bomb": (png(60_000, 60_000), "pixels"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_images_are_named(name):
    url, said = BAD[name]
    with pytest.raises(ApiError) as e:
        image(url, LIMITS, "messages[0].content[1]")
    assert e.value.status == 400
    assert e.value.param == "messages[0].content[1]"
    assert said in e.value.message
    assert "0x" not in e.value.message  # no addresses, no paths


@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=200), at=st.integers(0, 400))
def test_damaged_files_are_read_or_refused(data, at):
    raw = bytearray(base64.b64decode(data_url(gradient("RGB")).partition(",")[2]))
    raw[at : at + len(data)] = data
    try:
        got = image("data:image/png;base64," + base64.b64encode(raw).decode(), LIMITS, "x")
    except ApiError as e:
        assert e.status == 400
    else:
        assert got.mode == "RGB"


def chat(*parts):
    return [Message(role="user", content=list(parts))]


def test_parts_keep_their_order():
    url, other = data_url(gradient("RGB", (5, 4))), data_url(gradient("RGB", (6, 4)))
    parts = convert(
        chat(
            {"type": "text", "text": "a"},
            {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
            {"type": "text", "text": "b"},
            {"type": "input_image", "image_url": other},
        ),
        LIMITS,
    )[0]["content"]
    assert [p["type"] for p in parts] == ["text", "image", "text", "image"]
    assert [p["image"].width for p in parts if "image" in p] == [5, 6]


def test_too_many_images():
    part = {"type": "image_url", "image_url": {"url": data_url(gradient("RGB"))}}
    convert(chat(part) + chat(part), LIMITS)
    with pytest.raises(ApiError, match="more than 2 images") as e:
        convert(chat(part) + chat(part, part), LIMITS)
    assert e.value.param == "messages[1].content[1]"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "video_url"},
        {"type": "image", "path": "/etc/passwd"},
        {"type": "input_audio"},
        {},
        {"type": "text"},
        {"type": 5},
    ],
)
def test_other_parts_are_refused(part):
    with pytest.raises(ApiError) as e:
        convert(chat(part), LIMITS)
    assert e.value.param == "messages[0].content[0]"


def test_tool_calls_of_earlier_turns():
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]
    out = convert([Message(role="assistant", content=None, tool_calls=calls)], LIMITS)[0]
    assert out["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert "content" not in out
    for bad in ("{", "[" * 100_000):
        calls[0]["function"]["arguments"] = bad
        with pytest.raises(ApiError):
            convert([Message(role="assistant", tool_calls=calls)], LIMITS)
    with pytest.raises(ApiError):
        convert([Message(role="assistant", tool_calls=5)], LIMITS)
