"""Where the plan lies that the served model follows, and that the workspace's own stays as it is."""

import json

import pytest

from dz import settings
from dz.accept import plans
from dz.core.plan import Plan
from dz.core.workspace import Workspace


@pytest.fixture
def space(tmp_path, lock):
    return Workspace.of(lock.source, tmp_path / "reports")


def resolved(tmp_path, env=None, **flags):
    return settings.resolve(flags, no_config=True, cwd=tmp_path, env=env or {})


def states(lock, config):
    (lock.source.path / "config.json").write_text(json.dumps(config))


def write(space, path, **inputs):
    plan = Plan(
        model="org/toy", rev8="01234567", device="cpu", dtype="bfloat16", sites=(), hash="0" * 16, inputs=inputs
    )
    space.write(path, "plan", plan)


def test_another_dtype_is_kept_apart_with_the_lock_and_the_wishes(tmp_path, lock, space):
    states(lock, {"dtype": "bfloat16"})
    write(space, space.plan, set="rms_norm=reference", dtype="auto")
    before = space.plan.read_bytes()
    space.write(space.fetch, "fetch", {"source": 1})
    where = plans.place(resolved(tmp_path, dtype="float32"), lock, space)
    assert where.root == space.folder / "verify-float32" and where.settings.get("workspace") == str(where.root)
    assert where.space.fetch.read_bytes() == space.fetch.read_bytes()
    assert json.loads(where.space.plan.read_text())["data"]["inputs"]["set"] == "rms_norm=reference"
    assert space.plan.read_bytes() == before


def test_a_plan_kept_apart_stays_while_the_wishes_do(tmp_path, lock, space):
    states(lock, {"dtype": "bfloat16"})
    given = resolved(tmp_path, dtype="float32")
    write(space, space.plan, set="a=reference", dtype="auto")
    apart = plans.place(given, lock, space).space
    write(apart, apart.plan, set="a=reference", dtype="float32")
    made = apart.plan.read_bytes()
    plans.place(given, lock, space)
    assert apart.plan.read_bytes() == made
    write(space, space.plan, set="b=reference", dtype="auto")
    plans.place(given, lock, space)
    assert json.loads(apart.plan.read_text())["data"]["inputs"]["set"] == "b=reference"
    space.plan.unlink()
    plans.place(given, lock, space)
    assert not apart.plan.exists()


@pytest.mark.parametrize(
    ("config", "env", "flags"),
    [
        ({"dtype": "bfloat16"}, {}, {}),
        ({"dtype": "bfloat16"}, {"DZ_DTYPE": "float32"}, {}),  # then serve and adapt have it too
        ({"dtype": "bfloat16"}, {}, {"dtype": "auto"}),
        ({"torch_dtype": "float32"}, {}, {"dtype": "float32"}),
    ],
)
def test_the_same_dtype_shares_the_plan(tmp_path, lock, space, config, env, flags):
    states(lock, config)
    where = plans.place(resolved(tmp_path, env, **flags), lock, space)
    assert where.space == space and where.root == space.folder.parent
    assert where.settings.get("dtype") == ("float32" if env else "auto")


def test_a_dtype_that_only_a_part_states_is_not_the_checkpoints(tmp_path, lock, space):
    states(lock, {"text_config": {"dtype": "float32"}})
    assert plans.place(resolved(tmp_path, dtype="float32"), lock, space).root.name == "verify-float32"
    assert plans.stated_dtype(lock) == "float32"


def test_stated_dtype(lock):
    for config, want in (
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"text_config": {"torch_dtype": "float16"}}, "float16"),
        ({"dtype": None, "thinker_text_config": {"dtype": "bfloat16"}}, "bfloat16"),
        ({}, "float32"),
    ):
        states(lock, config)
        assert plans.stated_dtype(lock) == want
    lock.source.path.joinpath("config.json").unlink()
    assert plans.stated_dtype(lock) == "float32"


def test_a_plan_that_cannot_be_made_is_said(tmp_path, lock, space, monkeypatch):
    from dz import adapt
    from dz.core.protocols import Silent
    from dz.errors import Refused

    def refuse(*args, **given):
        raise Refused("no", "because", "never")

    monkeypatch.setattr(adapt, "current_plan", refuse, raising=False)
    where = plans.place(resolved(tmp_path), lock, space)
    assert plans.current(where, lock, trust=False, progress=Silent()) == (plans.UNKNOWN, "")
