"""--set and recipes: forms, ranks, names that nothing has."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dz.adapt.recipes import apply, chain
from dz.adapt.wishes import Wish, check_names, check_sites, of_recipe, parse_set
from dz.core.inventory import Site
from dz.core.recipe import Recipe, Wants, load_recipe
from dz.core.registry import Registry
from dz.errors import UsageError
from dz.settings import resolve


def site(id="model.layers.*.norm", op="rms_norm", members=("model.layers.0.norm", "model.layers.1.norm"), **more):
    return Site(id=id, kind="module", cls="N", where="", members=members, status="known", op=op, **more)


WORD = st.text("abcdefghij_0123456789", min_size=1, max_size=8)


@given(
    op=WORD,
    value=WORD,
    phase=st.sampled_from(["", "prefill", "decode"]),
    place=st.sampled_from(["", "model.layers.*.x", "a.b:f"]),
)
def test_every_form_is_read_back(op, value, phase, place):
    text = f"{place}:{op}" if place else op
    found = parse_set(f"{text}/{phase}={value}" if phase else f"{text}={value}")
    assert (found.op, found.values, found.site, found.phase, found.strength) == (op, (value,), place, phase, "set")


@pytest.mark.parametrize("text", ["rms_norm", "=torch", "rms_norm=", "rms_norm/later=torch"])
def test_malformed_sets_are_refused(text):
    with pytest.raises(UsageError):
        parse_set(text)


def test_a_wish_fits_by_op_site_and_phase():
    wish = parse_set("model.layers.1.*:rms_norm/decode=torch")
    assert wish.fits(site(), "decode")
    assert not wish.fits(site(), "prefill")
    assert not wish.fits(site(members=("model.layers.0.norm",)), "decode")
    assert not wish.fits(site(op="layer_norm"), "decode")
    assert parse_set("model.layers.*.norm:rms_norm=torch").fits(site(), "prefill")


@pytest.mark.parametrize(
    ("text", "near"),
    [("rms_nrm=torch", "rms_norm"), ("rms_norm=torhc", "torch"), ("rms_norm=referense", "reference")],
)
def test_unknown_names_suggest_the_nearest(text, near):
    with pytest.raises(UsageError) as e:
        check_names([parse_set(text)], Registry.discover())
    assert near in e.value.why


def test_sites_that_are_not_there_suggest_the_nearest():
    with pytest.raises(UsageError, match=r"no site fits 'model\.layer\.norm'") as e:
        check_sites([parse_set("model.layer.norm:rms_norm=torch")], [site()])
    assert "model.layers.*.norm" in e.value.why
    with pytest.raises(UsageError, match="no site of op 'layer_norm'"):
        check_sites([parse_set("layer_norm=torch")], [site()])
    check_sites([Wish("layer_norm", ("torch",), "", "", "prefer", "recipe r")], [site()])


def test_recipes_match_by_type_and_default_comes_last(tmp_path, monkeypatch):
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "mine.yaml").write_text("matches: ['odd_*']\nprefer:\n  ops: {rms_norm/decode: [torch, triton]}\n")
    monkeypatch.setenv("DZ_PATH", str(tmp_path))
    found = chain("odd_model")
    assert [r.name for r in found.recipes] == ["mine", "default"]
    assert [r.name for r in chain("another").recipes] == ["default"]
    assert chain("another", "mine").name == "mine + default"
    wish = of_recipe(found.recipes[0])[0]
    assert (wish.values, wish.phase, wish.strength) == (("torch", "triton"), "decode", "prefer")
    with pytest.raises(UsageError, match="no recipe"):
        chain("another", "mime")


def test_the_shipped_recipes_name_what_there_is():
    registry = Registry.discover()
    from dz.core import library

    for path in library.entries("recipes").values():
        check_names(of_recipe(load_recipe(path)), registry)


def test_settings_of_recipes_rank_under_flags():
    recipe = Recipe(name="r", require=Wants(settings={"block_size": 32}), prefer=Wants(settings={"max_num_seqs": 3}))
    from dz.adapt.recipes import Chain

    found, broken = apply(resolve({}, no_config=True, env={}), Chain((recipe,)))
    assert (found.get("block_size"), found.get("max_num_seqs"), broken) == (32, 3, ())
    user = resolve({}, no_config=True, env={"DZ_BLOCK_SIZE": "8", "DZ_MAX_NUM_SEQS": "5"})
    found, broken = apply(user, Chain((recipe,)))
    assert (found.get("block_size"), found.get("max_num_seqs"), broken) == (32, 5, ())
    found, broken = apply(resolve({"block_size": 8}, no_config=True, env={}), Chain((recipe,)))
    assert found.get("block_size") == 8
    assert broken == ("recipe r: block_size=32, broken by a flag (8)",)
