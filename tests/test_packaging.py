"""kernels/ and recipes/ lie at the top and are learnkv.kernels and learnkv/recipes to Python, however learnkv was installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RECIPES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "recipes").rglob("*.yaml"))
KERNELS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "kernels").rglob("*.py"))
MODULES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "learnkv").rglob("*.py") if path == path.resolve())
SHIPPED = {*MODULES, *(f"learnkv/{path}" for path in KERNELS + RECIPES)}

LOOK = """
import learnkv, learnkv.kernels.reference, learnkv.config
print(learnkv.__file__, learnkv.kernels.reference.__file__, len(learnkv.config.recipe_names()), sep="\\n")
"""


def run(*command: str | Path, folder: Path, path: Path | None = None) -> str:
    """What the command printed; `path` goes before everything that is installed."""
    environment = {**os.environ, "PYTHONPATH": str(path or ""), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run([str(part) for part in command], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pip(*arguments: str | Path, folder: Path) -> None:
    run(sys.executable, "-m", "pip", *arguments, "--quiet", folder=folder)


@pytest.mark.parametrize("name", ["kernels", "recipes"])
def test_the_links_point_to_the_top_level_folders(name):
    link = ROOT / "learnkv" / name
    assert link.is_symlink() and os.readlink(link) == f"../{name}"


@pytest.mark.parametrize("name", ["kernels", "recipes"])
def test_the_top_level_folders_are_no_packages(name):
    """With an __init__.py kernels/ would hide Hugging Face's `kernels` from transformers when run in the repository's root."""
    assert not (ROOT / name / "__init__.py").exists()


def test_hugging_faces_kernels_package_is_found_beside_ours(tmp_path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("theirs = True")
    code = "import kernels, learnkv.kernels.reference as ours; assert kernels.theirs; print(ours.__file__)"
    assert run(sys.executable, "-c", code, folder=ROOT, path=tmp_path).strip() == str(ROOT / "learnkv" / "kernels" / "reference.py")


def test_it_runs_from_the_repository_without_being_installed():
    code = f"import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in repr(f)]\n{LOOK}"
    assert run(sys.executable, "-c", code, folder=ROOT, path=ROOT).splitlines()[0] == str(ROOT / "learnkv" / "__init__.py")


# ---- built and installed


@pytest.fixture(scope="session")
def tree(tmp_path_factory):
    """A copy of what is shipped, links kept, so that builds leave nothing behind here."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("learnkv", "kernels", "recipes"):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    return tree


@pytest.fixture(scope="session")
def built(tree):
    """The folder with an sdist, and the wheel that was built from it."""
    run(sys.executable, "-m", "build", "--no-isolation", tree, folder=tree)
    return tree / "dist"


def only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


def test_the_wheel_holds_every_module_kernel_and_recipe_and_nothing_else(built):
    names = {name for name in zipfile.ZipFile(only(built, "*.whl")).namelist() if ".dist-info/" not in name}
    assert names == SHIPPED


def test_the_sdist_holds_files_where_the_repository_has_links(built):
    with tarfile.open(only(built, "*.tar.gz")) as archive:
        members = {name.partition("/")[2]: member for member in archive.getmembers() if (name := member.name)}
    assert SHIPPED | {"LICENSE", "README.md", "pyproject.toml"} <= set(members)
    assert all(members[name].isfile() for name in SHIPPED)


def test_an_installed_wheel_works_from_any_folder(built, tmp_path):
    pip("install", "--no-deps", "--target", tmp_path / "site", only(built, "*.whl"), folder=tmp_path)
    where, kernels, recipes = run(sys.executable, "-c", LOOK, folder=tmp_path, path=tmp_path / "site").split()
    assert Path(where).parents[1] == Path(kernels).parents[2] == tmp_path / "site"
    assert int(recipes) == len(RECIPES)
    told = run(sys.executable, tmp_path / "site" / "bin" / "learnkv", "--version", folder=tmp_path, path=tmp_path / "site")
    assert told.startswith("learnkv ")


def test_an_editable_install_follows_the_links(tree, tmp_path):
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", folder=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    # what this environment has, torch above all, is visible there without being installed again
    seen = [path for path in sys.path if path.endswith("site-packages")]
    only((tmp_path / "venv" / "lib"), "python*/site-packages").joinpath("parent.pth").write_text("\n".join(seen))
    pip("--python", python, "install", "--no-deps", "--no-build-isolation", "--editable", tree, folder=tmp_path)
    where, kernels, recipes = run(python, "-c", LOOK, folder=tmp_path).split()
    assert Path(where).parent == Path(kernels).parents[1] == tree / "learnkv"
    assert int(recipes) == len(RECIPES)
