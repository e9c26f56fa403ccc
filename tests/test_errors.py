"""The error type and the table that explains foreign exceptions."""

import pickle

import pytest

from dz.core.envelope import validate
from dz.errors import DzError, EnvironmentFailure, Refused, UsageError, explain


@pytest.mark.parametrize(("cls", "code"), [(DzError, 2), (Refused, 1), (UsageError, 2), (EnvironmentFailure, 3)])
def test_lines_document_and_pickle(cls, code):
    error = cls("no kernel for 'x'", "two were tried", "dz kernels ls", code="no_kernel")
    assert error.lines() == ["error: no kernel for 'x'", "  why: two were tried", "  next: dz kernels ls"]
    validate(error.data())
    assert error.data()["exit_code"] == code and error.data()["code"] == "no_kernel" and str(error) == error.what
    twin = pickle.loads(pickle.dumps(error))
    assert type(twin) is cls and twin.data() == error.data()


def made(*names: str) -> BaseException:
    """An exception of a class by the last name, whose bases have the others: as foreign libraries define them."""
    cls: type = Exception
    for name in names:
        cls = type(name, (cls,), {})
    return cls("line one\nline two")


@pytest.mark.parametrize(
    ("exc", "cls", "code"),
    [
        (made("HfHubHTTPError", "RepositoryNotFoundError", "GatedRepoError"), EnvironmentFailure, "gated"),
        (made("HfHubHTTPError", "RepositoryNotFoundError"), EnvironmentFailure, "not_found"),
        (made("HfHubHTTPError", "RevisionNotFoundError"), UsageError, "revision_not_found"),
        (made("HfHubHTTPError", "Unheard"), EnvironmentFailure, "hub"),
        (made("RuntimeError", "OutOfMemoryError"), EnvironmentFailure, "out_of_memory"),
        (ConnectionRefusedError("no"), EnvironmentFailure, "connection"),
        (MemoryError(), EnvironmentFailure, "out_of_memory"),
        (PermissionError(13, "denied", "/f"), EnvironmentFailure, "permission"),
        (OSError(28, "No space left on device"), EnvironmentFailure, "os"),
        (ModuleNotFoundError("No module named 'x'"), EnvironmentFailure, "missing_package"),
    ],
)
def test_explained_by_the_nearest_class(exc, cls, code):
    error = explain(exc)
    assert type(error) is cls and error.code == code and error.why and error.next
    assert error.what and "\n" not in error.what


def test_the_first_line_is_what_happened():
    assert explain(made("ConnectError")).what == "line one"
    assert explain(MemoryError()).what == "MemoryError"


def test_ours_and_unknown():
    error = UsageError("a", "b", "c")
    assert explain(error) is error
    assert explain(ValueError("x")) is None
    assert explain(KeyError("x")) is None
