"""Run `serve()` as a process, configured by one JSON argument."""

import json
import logging
import sys

from dz.core.source import Source
from dz.errors import DzError
from dz.serve.config import ImageLimits, Limits, ServeConfig
from dz.serve.launch import serve
from dz.serve.supervisor import Watch

given = json.loads(sys.argv[1])
config = given["config"]
limits = config.pop("limits", {})
images = ImageLimits(**limits.pop("images", {}))
watch = Watch(**config.pop("watch", {}))


class Listener:
    def note(self, text):
        print(text, file=sys.stderr, flush=True)

    def loaded(self, ready):
        self.note(f"loaded: {ready.mixers}")


logging.basicConfig(stream=sys.stderr, level=logging.INFO)
source = Source(name=given["model"], folder=given["model"], commit="", rev8="0" * 8, code_hash="", files=())
config = {k: tuple(v) if isinstance(v, list) else v for k, v in config.items()}
try:
    sys.exit(
        serve(
            ServeConfig(
                source=source,
                settings=given["settings"],
                command=(sys.executable, given["engine"]),
                limits=Limits(images=images, **limits),
                watch=watch,
                **{"port": 0, **config},
            ),
            Listener(),
        )
    )
except DzError as e:
    print(*e.lines(), sep="\n", file=sys.stderr, flush=True)
    sys.exit(e.exit_code)
