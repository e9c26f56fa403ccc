"""Plugins that test_worker.py gives to engine workers."""

import os
from pathlib import Path


def note(context):
    """Writes down that it ran, and in which process."""
    with Path(os.environ["DZ_TEST_NOTES"]).open("a") as f:
        f.write(f"{context.process} {os.getpid()}\n")


def break_loading(context):
    """Loading ends in something that no table explains."""
    import dz.engine.loader

    def load(*args, **kwargs):
        raise ArithmeticError("the loader is broken")

    dz.engine.loader.load = load


def break_steps(context):
    """The third step of the engine fails."""
    from dz.engine.runner import Runner

    right, count = Runner.execute, []

    def execute(self, *args):
        count.append(1)
        if len(count) == 3:
            raise ArithmeticError("the step is broken")
        return right(self, *args)

    Runner.execute = execute


def out_of_memory(context):
    """A step finds no memory on the device."""
    import torch

    from dz.engine.runner import Runner

    def execute(self, *args):
        raise torch.OutOfMemoryError("tried to allocate 20.00 GiB")

    Runner.execute = execute


def poison(context):
    """Requests with token 95 get values that are not finite."""
    import torch

    from dz.engine.runner import Runner

    right = Runner.execute

    def execute(self, batch, wanted):
        out, at = right(self, batch, wanted).clone(), 0
        for w, offsets in zip(batch.work, wanted, strict=True):
            if 95 in w.seq.tokens:
                out[at : at + len(offsets)] = torch.nan
            at += len(offsets)
        return out

    Runner.execute = execute
