import base64
import io
import subprocess
import sys

import pytest
from PIL import Image

from dz.demo import talk
from dz.errors import Refused


def test_metrics_text_is_read_with_its_labels():
    text = '# TYPE a counter\na 3\na_total{x="p|q",y="say \\"hi\\""} 1.5e+02 1700000000\ndz:b{le="+Inf"} NaN\n\n'
    (first, second, third) = talk.parse_metrics(text)
    assert first == ("a", {}, 3.0)
    assert second == ("a_total", {"x": "p|q", "y": 'say \\"hi\\"'}, 150.0)
    assert third[0] == "dz:b" and third[2] != third[2]


def test_pictures_differ_and_are_pictures():
    a, b = talk.picture(230, 20), talk.picture(20, 230)
    assert a != b and a["type"] == "image_url"
    data = a["image_url"]["url"].removeprefix("data:image/png;base64,")
    image = Image.open(io.BytesIO(base64.b64decode(data)))
    assert (
        image.size == (72, 48) and image.getpixel((0, 0)) == (230, 20, 0) and image.getpixel((71, 47)) == (230, 20, 255)
    )


def test_no_server_is_refused_in_time():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"])
    try:
        with pytest.raises(Refused, match="did not come up"):
            talk.wait_ready(f"http://127.0.0.1:{talk.free_port()}", process, 0.3)
    finally:
        process.kill()
        process.wait()
    with pytest.raises(Refused) as e:
        talk.wait_ready(f"http://127.0.0.1:{talk.free_port()}", process, 5)
    assert "ended with exit code" in e.value.why
