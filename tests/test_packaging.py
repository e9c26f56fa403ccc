"""The wheel and the editable install: everything ships, from anywhere, beside the other distribution named kernels."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
OFFLINE = ["--no-build-isolation", "--no-deps", "--no-index"]
DOOR = {"__init__.py", "__pycache__"}  # the wheel has the door to the kernels in the same folder as the kernels
KINDS = ("kernels", "recipes", "checklists")
PROBE = f"""
import json, importlib
import dz, dz.kernels, kernels
from dz.shipped import folder
from dz.core.registry import Registry
from dz.core.envelope import schema
from dz.backends.profiles import profiles
found = Registry.discover()
print(json.dumps({{
    "dz": dz.__file__, "marker": getattr(kernels, "MARKER", kernels.__file__),
    "folders": {{k: [str(folder(k)), sorted(p.name for p in folder(k).glob("*"))] for k in {KINDS}}},
    "ops": sorted(found.ops), "found": sorted(found.kernels), "unavailable": found.unavailable,
    "source": importlib.import_module("dz.kernels.rms_norm.torch").__file__,
    "schema": schema("error")["title"], "profiles": len(profiles()),
}}))
"""


def run(command: list[str], cwd: Path, path: list[Path] = (), **env: str) -> str:
    """Run a command and return what it prints; PYTHONPATH is `path` alone and no user site is read."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("DZ_", "PYTHON", "PIP_"))}
    clean |= {"PYTHONPATH": os.pathsep.join(map(str, path)), "PYTHONNOUSERSITE": "1", "OMP_NUM_THREADS": "1", **env}
    done = subprocess.run(command, cwd=cwd, env=clean, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A copy of what a wheel is built from, so that building writes nothing into the checkout."""
    copy = tmp_path_factory.mktemp("source") / "dz"
    copy.mkdir()
    for name in ("dz", *KINDS):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for kind in KINDS[1:]:
        (copy / kind / "probe.yaml").write_text("summary: made up\n")
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory) -> Path:
    """The wheel, built by the declared backend."""
    pytest.importorskip("hatchling")
    out = tmp_path_factory.mktemp("wheel")
    run([*PIP, "wheel", *OFFLINE, "-w", str(out), str(source)], out)
    (file,) = out.glob("dz-*.whl")
    return file


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory) -> Path:
    """A folder with the wheel installed in it and another distribution `kernels` beside it."""
    out = tmp_path_factory.mktemp("site")
    run([*PIP, "install", *OFFLINE, "--target", str(out), str(wheel)], out)
    other_distribution(out)
    return out


def other_distribution(folder: Path) -> None:
    """The distribution that holds the top-level name `kernels`, as pip would lay it out."""
    (folder / "kernels").mkdir()
    (folder / "kernels/__init__.py").write_text("MARKER = 'the other distribution'\n")
    info = folder / "kernels-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.1.0\n")
    (info / "RECORD").write_text("kernels/__init__.py,,\n")


def check(probe: str, home: Path, folders: Path, source: Path) -> None:
    """What must hold wherever dz runs: it is the one in `home`, its folders lie in `folders` and hold what `source`'s
    do, `import kernels` means the other distribution, and kernels, schemas and profiles are found."""
    got = json.loads(probe.splitlines()[-1])
    assert Path(got["dz"]).is_relative_to(home)
    assert got["marker"] == "the other distribution"
    for kind, (folder, names) in got["folders"].items():
        assert Path(folder) == folders / kind
        assert set(names) - DOOR == {p.name for p in (source / kind).glob("*")} - DOOR
    assert Path(got["source"]) == folders / "kernels/rms_norm/torch.py"
    assert "rms_norm" in got["ops"] and "rms_norm/torch" in got["found"]
    assert not {key: why for key, why in got["unavailable"].items() if "triton" not in why}
    assert got["schema"].startswith("dz.error/1") and got["profiles"] > 3


def test_the_wheel_holds_everything_and_nothing_else(wheel, source):
    with zipfile.ZipFile(wheel) as z:
        names = set(z.namelist())
    info = next(n for n in names if n.endswith("/METADATA")).rpartition("/")[0]
    assert {n.partition("/")[0] for n in names} == {"dz", info}
    for top in KINDS:
        for file in (p for p in (source / top).rglob("*") if p.is_file()):
            assert f"dz/{top}/{file.relative_to(source / top)}" in names
    for file in (p for p in (source / "dz").rglob("*") if p.is_file()):
        assert str(file.relative_to(source)) in names
    assert f"{info}/licenses/LICENSE" in names and f"{info}/entry_points.txt" in names
    assert not [n for n in names if "__pycache__" in n or n.startswith("dz/tests")]


@pytest.mark.parametrize("where", ["elsewhere", "checkout"])
def test_the_wheel_runs(site, source, tmp_path, where):
    """Installed, run from an empty folder and from the checkout's root (with -P, as the dz script does, the working
    folder is not on the path)."""
    cwd = tmp_path if where == "elsewhere" else ROOT
    flags = ["-P"] if where == "checkout" else []
    check(run([sys.executable, *flags, "-c", PROBE], cwd, [site]), site, site / "dz", source)
    assert run([sys.executable, *flags, "-m", "dz", "--version"], cwd, [site]).startswith("dz ")


def test_the_script_from_the_checkouts_root(site):
    """pip's script puts its own folder first, not the working folder: it runs the wheel even in a checkout."""
    script = site / "bin/dz"
    assert run([sys.executable, str(script), "--version"], ROOT, [site]) == run(
        [sys.executable, str(script), "--version"], site, [site]
    )
    out = run([sys.executable, str(script), "kernels", "show", "rms_norm/torch", "--json"], ROOT, [site])
    assert Path(json.loads(out)["data"]["file"]) == site / "dz/kernels/rms_norm/torch.py"


def test_the_checkout_runs_bare(tmp_path):
    """`python -m dz` and `import kernels` at the checkout's root, which is first on the path there: the folder kernels/
    has no __init__.py, so a distribution of that name further on wins."""
    other_distribution(tmp_path)
    check(run([sys.executable, "-c", PROBE], ROOT, [tmp_path]), ROOT / "dz", ROOT, ROOT)
    assert run([sys.executable, "-m", "dz", "--version"], ROOT, [tmp_path]).startswith("dz ")


@pytest.fixture(scope="module")
def editable(source, tmp_path_factory) -> Path:
    """An editable install of the copy: pip's own, into a fresh environment that sees this one's packages."""
    pytest.importorskip("hatchling")
    env = tmp_path_factory.mktemp("editable")
    run([sys.executable, "-m", "venv", "--without-pip", str(env)], env)
    (site,) = env.glob("lib/python*/site-packages")
    others = [p for p in sys.path if p.endswith("site-packages")]
    (site / "base.pth").write_text("\n".join(others) + "\n")  # torch and the rest; its own .pth files are not read
    python = env / "bin/python"
    install = [str(python), *PIP[1:], "install", *OFFLINE, "--ignore-installed", "-e", str(source)]
    run(install, env)
    other_distribution(site)
    return env


@pytest.mark.parametrize("where", ["elsewhere", "checkout"])
def test_the_editable_install_runs(editable, source, tmp_path, where):
    cwd = tmp_path if where == "elsewhere" else source
    check(run([str(editable / "bin/python"), "-c", PROBE], cwd), source / "dz", source, source)
    assert run([str(editable / "bin/dz"), "--version"], cwd).startswith("dz ")


def test_dz_path_adds_a_kernel_folder(site, tmp_path):
    kernel = tmp_path / "kernels/rms_norm/mine.py"
    kernel.parent.mkdir(parents=True)
    kernel.write_text(
        "from dz.core.kernel import Kernel, Requires\n"
        "KERNEL = Kernel(op='rms_norm', technique='mine', summary='ours', run=lambda x: x, requires=Requires())\n"
    )
    for cwd, path, given in ((tmp_path, [site], True), (ROOT, [], True), (ROOT, [site], False)):
        env = {"DZ_PATH": str(tmp_path)} if given else {}
        rows = json.loads(run([sys.executable, "-m", "dz", "kernels", "ls", "--json"], cwd, path, **env))["data"][
            "kernels"
        ]
        keys = {r["key"] for r in rows if r["status"] == "available"}
        assert "rms_norm/torch" in keys and ("rms_norm/mine" in keys) == given


def test_a_spawned_worker_finds_the_kernels(site, tmp_path):
    """multiprocessing's spawn imports dz again in a child, from the wheel."""
    script = tmp_path / "spawn.py"
    script.write_text(
        "import multiprocessing as mp\n"
        "def work(_):\n"
        "    import dz.kernels.rms_norm.torch as m\n"
        "    return m.__file__\n"
        "if __name__ == '__main__':\n"
        "    with mp.get_context('spawn').Pool(1) as pool: print(pool.map(work, [0])[0])\n"
    )
    assert run([sys.executable, str(script)], tmp_path, [site]).strip() == str(site / "dz/kernels/rms_norm/torch.py")
