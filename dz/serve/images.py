"""Images in requests: data URLs to PIL images, within limits. Nothing is ever fetched from elsewhere."""

from __future__ import annotations

import base64
import binascii
import io
import re
import urllib.parse
import warnings
from typing import Any

from dz.serve.config import ImageLimits
from dz.serve.errors import ApiError, bad

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+)?((?:;[\w.+-]+=[^;,]*)*)(;base64)?,", re.IGNORECASE)


def image(url: Any, limits: ImageLimits, where: str) -> Any:
    """The RGB picture of a data URL, turned as its EXIF data says. Raises ApiError 400 naming `where`."""
    if not isinstance(url, str):
        raise bad(f"{where}: it needs a URL", where)
    match = _DATA_URL.match(url)
    if match is None:
        kind = url.partition(":")[0][:20]
        raise bad(f"{where}: only data URLs are taken, not {kind!r}; send data:image/png;base64,...", where)
    payload = url[match.end() :]
    if len(payload) * 3 // 4 > limits.bytes + 4:
        raise bad(f"{where}: the image has more than {limits.bytes:,} bytes", where)
    return _open(_bytes(payload, bool(match.group(3)), where), limits, where)


def _bytes(payload: str, is_base64: bool, where: str) -> bytes:
    if not is_base64:
        return urllib.parse.unquote_to_bytes(payload)
    try:
        text = "".join(urllib.parse.unquote(payload).split())
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError) as e:
        raise bad(f"{where}: the data URL is not valid base64: {e}", where) from None


def _open(data: bytes, limits: ImageLimits, where: str) -> Any:
    from PIL import Image, ImageOps

    if len(data) > limits.bytes:
        raise bad(f"{where}: the image has more than {limits.bytes:,} bytes", where)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limit below is ours
            with Image.open(io.BytesIO(data), formats=FORMATS) as picture:
                if picture.width * picture.height > limits.pixels:
                    size = f"{picture.width} x {picture.height}"
                    raise bad(f"{where}: the image has {size} pixels; at most {limits.pixels:,} are taken", where)
                return (ImageOps.exif_transpose(picture) or picture).convert("RGB")
    except ApiError:
        raise
    except Exception as e:  # noqa: BLE001  decoders raise anything on broken files
        said = " ".join(str(e).replace(str(io.BytesIO), "").split())
        said = re.sub(r"<_io\.BytesIO object at 0x[0-9a-f]+>", "the data", said)[:150]
        raise bad(f"{where}: the image cannot be read ({', '.join(FORMATS)}): {said}", where) from None
