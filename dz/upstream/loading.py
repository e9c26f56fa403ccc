"""Load tokenizer and processor through upstream's Auto classes, with or without torchvision."""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
from typing import Any

from dz.core.source import Source
from dz.errors import DzError, EnvironmentFailure, Refused
from dz.upstream.config import raw_config
from dz.upstream.trust import repository_code

_FILES = (
    "tokenizer_config.json",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)


def takes_images(source: Source) -> bool:
    """Whether the repository is for images: a vision configuration, or the settings of an image processor."""
    vision = any(isinstance(v, dict) and "vision" in k for k, v in raw_config(source).items())
    return (
        vision
        or "image_processor" in _json(source, "processor_config.json")
        or (source.path / "preprocessor_config.json").is_file()
    )


def load_tokenizer(source: Source, *, trust: bool) -> Any:
    """Upstream's tokenizer. Raises Refused when there is none or it does not load."""
    from transformers import AutoTokenizer

    try:
        with repository_code(source, trust=trust):
            return AutoTokenizer.from_pretrained(source.folder, trust_remote_code=trust)
    except Exception as e:
        raise _not_loaded("tokenizer", source, e, trust) from e


def load_processor(source: Source, *, trust: bool) -> Any:
    """Upstream's processor; None where upstream has only a tokenizer for the model. Without torchvision, upstream's PIL
    image processor is used where there is one, and videos are left out.

    Raises EnvironmentFailure when torchvision is needed and not there, Refused when it does not load for another
    reason."""
    from transformers import AutoProcessor

    try:
        with repository_code(source, trust=trust):
            found = AutoProcessor.from_pretrained(source.folder, trust_remote_code=trust)
    except DzError:
        raise
    except Exception as e:
        if _has_torchvision():
            raise _not_loaded("processor", source, e, trust) from e
        found = _without_videos(source, trust, e)
    return found if hasattr(found, "image_processor") else None


def _has_torchvision() -> bool:
    return "torchvision" in sys.modules or importlib.util.find_spec("torchvision") is not None


def _without_videos(source: Source, trust: bool, cause: Exception) -> Any:
    """The processor put together from its parts, the image part on PIL, the video part left out. Raises
    EnvironmentFailure if it cannot be."""
    try:
        cls = _processor_class(source)
        names = inspect.signature(cls.__init__).parameters
        parts: dict[str, Any] = {"tokenizer": load_tokenizer(source, trust=trust)}
        parts["image_processor"] = _pil_image_processor(source, trust)
        settings = _json(source, "processor_config.json")
        settings |= {"chat_template": getattr(parts["tokenizer"], "chat_template", None), "video_processor": None}
        parts |= {k: v for k, v in settings.items() if k in names and k not in parts}
        return _tolerant(cls)(**parts)
    except Exception as e:
        said = " ".join(f"{type(cause).__name__}: {cause}".split())[:160]
        then = " ".join(f"{type(e).__name__}: {e}".split())[:160]
        raise EnvironmentFailure(
            f"the image processor of {source.name} needs torchvision",
            said if said == then else f"{said}; and on PIL alone: {then}",
            "python -m pip install torchvision (the build that matches your torch)",
            code="needs_torchvision",
        ) from e


def _tolerant(cls: Any) -> Any:
    """The processor class, but that its video part may be missing."""

    def check(self: Any, argument_name: str, argument: Any) -> Any:
        if argument_name == "video_processor" and argument is None:
            return None
        return cls.check_argument_for_proper_class(self, argument_name, argument)

    return type(cls.__name__, (cls,), {"check_argument_for_proper_class": check, "__module__": cls.__module__})


def _processor_class(source: Source) -> Any:
    import transformers
    from transformers.models.auto import processing_auto

    files = ("processor_config.json", "tokenizer_config.json")
    name = next((n for f in files if (n := _json(source, f).get("processor_class"))), None)
    known: Any = vars(processing_auto)["PROCESSOR_MAPPING_NAMES"]
    return getattr(transformers, str(name or known[raw_config(source)["model_type"]]))


def _pil_image_processor(source: Source, trust: bool) -> Any:
    from transformers import AutoImageProcessor

    choice = (
        {"backend": "pil"}
        if "backend" in (inspect.getdoc(AutoImageProcessor.from_pretrained) or "")
        else {"use_fast": False}
    )
    with repository_code(source, trust=trust):
        return AutoImageProcessor.from_pretrained(source.folder, trust_remote_code=trust, **choice)


def _json(source: Source, name: str) -> dict[str, Any]:
    path = source.path / name
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text("utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as e:
        raise Refused(f"{path} is not JSON", str(e), f"dz fetch {source.name} --force", code="bad_json") from e
    return data if isinstance(data, dict) else {}


def _not_loaded(what: str, source: Source, cause: Exception, trust: bool) -> DzError:
    if isinstance(cause, DzError):
        return cause
    said = " ".join(f"{type(cause).__name__}: {cause}".split())[:400]
    has_code = any("auto_map" in _json(source, name) for name in _FILES)
    then = (
        "read the repository's code, then add --trust-remote-code"
        if has_code and not trust
        else f"compare the files in {source.folder} with what upstream wants"
    )
    return Refused(f"the {what} of {source.name} does not load", said, then, code=f"bad_{what}")
