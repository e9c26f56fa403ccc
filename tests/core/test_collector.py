"""The collector is off inside and as it was afterwards, whatever happens."""

import gc

import pytest

from dz.core.collector import paused


def test_off_inside_and_on_again():
    with paused():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_after_an_error():
    with pytest.raises(ValueError, match="x"), paused():
        raise ValueError("x")
    assert gc.isenabled()


def test_off_stays_off():
    gc.disable()
    try:
        with paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_decorated_function_keeps_its_answer():
    @paused()
    def f(x):
        return x, gc.isenabled()

    assert f(3) == (3, False) and f(4) == (4, False) and gc.isenabled()
