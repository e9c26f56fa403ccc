"""Settings: precedence, origins, refusals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dz.errors import UsageError
from dz.settings import SPECS, resolve


@pytest.fixture
def place(tmp_path):
    """A project below a folder with dz.toml, and a home for the user's config: (cwd, env, write)."""
    (tmp_path / "project/deep").mkdir(parents=True)
    (tmp_path / "home/dz").mkdir(parents=True)
    files = {
        "project": tmp_path / "project/dz.toml",
        "user": tmp_path / "home/dz/config.toml",
        "other": tmp_path / "other.toml",
    }
    return tmp_path / "project/deep", {"XDG_CONFIG_HOME": str(tmp_path / "home")}, files


def test_defaults(place):
    cwd, env, _ = place
    got = resolve(cwd=cwd, env=env)
    assert [v.name for v in got.values()] == list(SPECS)
    assert all(v.value == SPECS[v.name].default and v.origin == "default" for v in got.values())


def test_each_layer_beats_the_next(place):
    cwd, env, files = place

    def port(flags=None, **kwargs):
        value = next(
            v
            for v in resolve(flags, cwd=cwd, env=env, **kwargs).with_recipe("r", {"port": 1}).values()
            if v.name == "port"
        )
        return value.value, value.origin

    assert port() == (1, "recipe r")
    files["user"].write_text("port = 2")
    assert port() == (2, str(files["user"]))
    files["project"].write_text("port = 3")
    assert port() == (3, str(files["project"]))
    files["other"].write_text("port = 4")
    assert port(config=files["other"]) == (4, str(files["other"]))
    env["DZ_PORT"] = "5"
    assert port() == (5, "DZ_PORT")
    assert port({"port": 6}) == (6, "flag")
    assert port({"port": None}) == (5, "DZ_PORT")
    del env["DZ_PORT"]
    assert port(no_config=True) == (1, "recipe r")


def test_hf_endpoint_is_respected(place):
    cwd, env, files = place
    env["HF_ENDPOINT"] = "http://mirror/"
    assert resolve(cwd=cwd, env=env).get("hf_endpoint") == "http://mirror"
    files["project"].write_text('hf-endpoint = "http://ours"')
    assert resolve(cwd=cwd, env=env).get("hf_endpoint") == "http://ours"


@pytest.mark.parametrize(
    ("text", "value"),
    [("4096", 4096), ("4k", 4000), ("4K", 4096), ("1M", 1 << 20), ("1m", 10**6), ("1.5k", 1500), ("0", 0)],
)
def test_token_counts(place, text, value):
    assert resolve({"max_model_len": text}, cwd=place[0], env={}).get("max_model_len") == value


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"max_model_len": "lots"}, ["max_model_len = 'lots'", "flag"]),
        ({"max_model_len": "k"}, ["max_model_len = 'k'"]),
        ({"port": "80x"}, ["port = '80x'", "int"]),
        ({"port": 1.5}, ["port = 1.5"]),
        ({"port": True}, ["port = True"]),
        ({"port": 65536}, ["at most 65535"]),
        ({"max_num_seqs": 0}, ["max_num_seqs = 0", "at least 1"]),
        ({"max_model_len": "-1k"}, ["at least 0"]),
        ({"max_model_len": "infk"}, ["max_model_len = 'infk'"]),
        ({"gpu_memory_utilization": "most"}, ["float"]),
        ({"gpu_memory_utilization": 0}, ["at least 0.01 and at most 1"]),
        ({"gpu_memory_utilization": "nan"}, ["gpu_memory_utilization = 'nan'"]),
        ({"prot": 1}, ["unknown setting 'prot'", "did you mean 'port'?"]),
    ],
)
def test_bad_values_are_named_with_their_origin(place, flags, words):
    with pytest.raises(UsageError) as e:
        resolve(flags, cwd=place[0], env=place[1])
    text = " ".join(e.value.lines())
    assert all(word in text for word in words), text


def test_bad_files(place):
    cwd, env, files = place
    with pytest.raises(UsageError, match="no config file at"):
        resolve(config=files["other"], cwd=cwd, env=env)
    files["project"].write_text("port = ")
    with pytest.raises(UsageError, match="is not valid TOML"):
        resolve(cwd=cwd, env=env)
    files["project"].write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="is not valid TOML"):
        resolve(cwd=cwd, env=env)
    assert resolve(no_config=True, cwd=cwd, env=env).get("port") == SPECS["port"].default


def test_a_bad_variable_is_named(place):
    with pytest.raises(UsageError, match="DZ_PORT"):
        resolve(cwd=place[0], env={**place[1], "DZ_PORT": "x"})


def test_a_recipe_only_fills_defaults(place):
    got = resolve({"port": 9}, cwd=place[0], env=place[1])
    with_recipe = got.with_recipe("fam", {"port": 1, "block_size": 32})
    assert (with_recipe.get("port"), with_recipe.get("block_size")) == (9, 32)
    assert got.get("block_size") == SPECS["block_size"].default
    with pytest.raises(UsageError, match="recipe fam"):
        got.with_recipe("fam", {"blocksize": 32})


@given(st.from_regex(r"[-+]?[0-9._einfa]{0,6} ?[kKmMx]?", fullmatch=True) | st.text(max_size=4))
def test_any_token_text_is_a_count_or_refused(text):
    try:
        value = resolve({"max_model_len": text}, no_config=True, env={}).get("max_model_len")
    except UsageError:
        return
    assert isinstance(value, int) and value >= 0
