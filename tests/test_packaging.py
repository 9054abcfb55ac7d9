"""What is built can be installed by a stranger, and brings three libraries and nothing else."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.message import Message
from pathlib import Path

import pytest
from documents import ROOT

import rollout

pytestmark = pytest.mark.slow

CORE = {"aiohttp", "msgspec", "environs"}
SOURCES = ("rollout", "README.md", "LICENSE", "setup.cfg", "pyproject.toml")
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "OSMOSIS_"))}


def run(*command: str | Path, cwd: Path) -> str:
    """What the command prints; the test fails, with all of its output, if the command does."""
    done = subprocess.run(
        command, cwd=cwd, env=ENVIRONMENT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from it."""
    source = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source / name)
    run(sys.executable, "-m", "build", "--outdir", source / "dist", source, cwd=source)
    return source / "dist"


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    """The wheel."""
    (found,) = dist.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment where the wheel is installed."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    interpreter = folder / "bin" / "python"
    run(interpreter, "-m", "pip", "install", "-q", "--disable-pip-version-check", wheel, cwd=folder)
    return interpreter


def metadata_of(wheel: Path) -> Message:
    """What the wheel says of itself."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))


def test_the_wheel_has_the_package_with_its_data_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    expected = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "rollout").rglob("*")
        if path.suffix in (".py", ".typed", ".jsonl") and "__pycache__" not in path.parts
    }

    assert {name for name in names if ".dist-info/" not in name} == expected
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_sdist_has_what_the_wheel_is_made_of(dist: Path) -> None:
    (found,) = dist.glob("*.tar.gz")
    with tarfile.open(found) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}

    assert {"README.md", "LICENSE", "setup.cfg", "pyproject.toml", "rollout/cli.py", "rollout/py.typed"} <= names


def test_the_metadata_name_three_libraries(wheel: Path) -> None:
    metadata = metadata_of(wheel)
    required = [text for text in metadata.get_all("Requires-Dist", []) if "extra ==" not in text]

    assert {re.split(r"[^\w-]", text)[0] for text in required} == CORE
    assert metadata["Version"] == rollout.__version__
    assert metadata["Requires-Python"] == ">=3.11"
    assert str(metadata.get_payload()).startswith("# rollout")


def test_the_command_line_works_where_only_the_wheel_is(python: Path, tmp_path: Path) -> None:
    assert "serve" in run(python, "-m", "rollout", "--help", cwd=tmp_path)
    assert rollout.__version__ in run(python.with_name("rollout"), "--version", cwd=tmp_path)
    assert "valid" in run(python, "-m", "rollout", "validate", "rollout.examples.calculator:agent", cwd=tmp_path)
    assert run(python, "-m", "rollout", "demo", "--rows", "3", "--json", cwd=tmp_path).count('"reward":1.0') == 3


def test_every_public_name_works_where_only_the_wheel_is(python: Path, tmp_path: Path) -> None:
    program = "import rollout, rollout.testing as t; [getattr(m, n) for m in (rollout, t) for n in m.__all__]"

    run(python, "-W", "error", "-c", program, cwd=tmp_path)


def test_nothing_is_installed_that_the_three_libraries_do_not_bring(python: Path, tmp_path: Path) -> None:
    program = (
        "import importlib.metadata as m, re\n"
        "todo, found = ['rollout'], set()\n"
        "while todo:\n"
        "    name = re.sub('[-_.]+', '-', todo.pop()).lower()\n"
        "    if name not in found:\n"
        "        try: needs = m.requires(name) or []\n"
        "        except m.PackageNotFoundError: continue\n"
        "        found.add(name)\n"
        "        todo += [re.split(r'[^\\w.-]', n)[0] for n in needs if 'extra ==' not in n]\n"
        "installed = {re.sub('[-_.]+', '-', d.name).lower() for d in m.distributions()}\n"
        "print(*sorted(installed - found - {'pip', 'setuptools', 'wheel'}))\n"
    )

    assert run(python, "-c", program, cwd=tmp_path).split() == []
