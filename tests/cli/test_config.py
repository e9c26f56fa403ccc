"""`dz config show`."""

import json

from dz.core.envelope import validate
from dz.settings import SPECS


def test_every_setting_with_its_origin(dz, tmp_path, monkeypatch):
    (tmp_path / "dz.toml").write_text("port = 9001\nmax-num-seqs = 3\n")
    monkeypatch.setenv("DZ_MAX_NUM_SEQS", "5")
    code, out, _ = dz("config", "show", "--origin")
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines()}
    assert code == 0 and set(SPECS) < set(rows)
    assert rows["port"] == ["9001", str(tmp_path / "dz.toml")]
    assert rows["max_num_seqs"] == ["5", "DZ_MAX_NUM_SEQS"]
    assert rows["host"] == ["127.0.0.1", "default"]


def test_config_and_no_config(dz, tmp_path):
    (tmp_path / "dz.toml").write_text("port = 9001\n")
    (tmp_path / "other.toml").write_text("port = 9002\n")

    def port(*argv: str) -> int:
        document = json.loads(dz("config", "show", "--json", *argv)[1])
        validate(document)
        return next(s["value"] for s in document["data"]["settings"] if s["name"] == "port")

    assert port() == 9001
    assert port("--config", "other.toml") == 9002
    assert port("--no-config") == 8000


def test_the_bare_group_shows(dz):
    assert dz("config")[1] == dz("config", "show")[1]


def test_a_bad_file_is_named(dz, tmp_path):
    (tmp_path / "dz.toml").write_text("prot = 1\n")
    code, out, err = dz("config", "show")
    assert code == 2 and out == "" and "unknown setting 'prot'" in err and "did you mean 'port'?" in err
    assert str(tmp_path / "dz.toml") in err
