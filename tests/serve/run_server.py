"""Run `serve()` in a process of its own, configured by one document."""

import logging
import os
import sys
import traceback

from dz.core.source import Source
from dz.errors import DzError
from dz.serve.config import ImageLimits, Limits, ServeConfig
from dz.serve.launch import serve
from dz.serve.supervisor import Watch
from dz.upstream.processing import Processor


class Listener:
    def note(self, text):
        print(text, file=sys.stderr, flush=True)

    def loaded(self, ready):
        self.note(f"loaded: {ready.mixers}")


def source(model):
    """A folder as a source."""
    return Source(name=model, folder=model, commit="", rev8="0" * 8, code_hash="", files=())


if "WARM_UP" in os.environ:  # in the process that servers are forked from
    Processor.load(source(os.environ.pop("WARM_UP")), trust=False)


def configuration(document):
    """A ServeConfig from plain values."""
    config = {k: tuple(v) if isinstance(v, list) else v for k, v in document["config"].items()}
    limits = dict(config.pop("limits", {}))
    images = ImageLimits(**limits.pop("images", {}))
    return ServeConfig(
        source=source(document["model"]),
        settings=document["settings"],
        limits=Limits(images=images, **limits),
        watch=Watch(**config.pop("watch", {})),
        **{"port": 0, "command": (sys.executable, document["engine"]), **config},
    )


def main(document, log):
    """Serve; everything that is said goes to the file `log`."""
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    sys.stderr = sys.stdout = os.fdopen(2, "w", buffering=1)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, force=True)
    try:
        code = serve(configuration(document), Listener())
    except DzError as e:
        print(*e.lines(), sep="\n", file=sys.stderr, flush=True)
        code = e.exit_code
    except BaseException:
        traceback.print_exc()
        code = 99
    sys.exit(code)
