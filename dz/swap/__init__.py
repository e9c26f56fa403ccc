"""A plan's choices in a live upstream model, as a context that asserts it was undone."""

from dz.swap.bind import Applied, bind
from dz.swap.capture import Call, capture

__all__ = ["Applied", "Call", "bind", "capture"]
