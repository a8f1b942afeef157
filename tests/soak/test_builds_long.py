"""Wheels made of an sdist: compiled and pure, with a C compiler and without; each works in an environment of its own.

What pip needs comes from a package index.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 600
PROGRAM = """
import crossfade

@crossfade.remote
class Adder:
    def add(self, x):
        return x + 1

with crossfade.InputNode() as x:
    output = Adder.remote().add.bind(x)
with output.compile() as graph:
    print(crossfade.compiled, graph.execute(1).get())
"""


def run(*command: str, folder: Path, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "CC")}
    environment.update(variables)
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    checkout = folder / "checkout"
    tracked = run("git", "ls-files", folder=ROOT).splitlines()
    for name in tracked:
        if (ROOT / name).exists():
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, checkout / name)
    run(sys.executable, "-m", "build", "--sdist", "--outdir", str(folder), ".", folder=checkout)
    return next(folder.glob("*.tar.gz"))


@pytest.fixture(scope="module")
def no_compiler(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PATH with what pip needs, and no compiler."""
    folder = tmp_path_factory.mktemp("bin")
    for name in ("sh", "uname", "env"):
        if found := shutil.which(name):
            (folder / name).symlink_to(found)
    return str(folder)


@pytest.mark.timeout(3 * LIMIT_S)
@pytest.mark.parametrize("is_asked", [True, False])
@pytest.mark.parametrize("has_compiler", [True, False])
def test_an_sdist_builds_and_works(
    sdist: Path, no_compiler: str, tmp_path: Path, is_asked: bool, has_compiler: bool
) -> None:
    is_compiled = is_asked and has_compiler
    path = {} if has_compiler else {"PATH": no_compiler}
    asked = {"CROSSFADE_COMPILE": "1"} if is_asked else {}
    run(sys.executable, "-m", "venv", "venv", folder=tmp_path)
    python = str(tmp_path / "venv" / "bin" / "python")
    wheel = ["-m", "pip", "wheel", "--no-deps", "--wheel-dir", "wheels", str(sdist)]
    run(python, *wheel, folder=tmp_path, **asked, **path)
    built = next((tmp_path / "wheels").glob("*.whl"))
    tag = f"-cp3{sys.version_info.minor}-cp3{sys.version_info.minor}-linux_" if is_compiled else "-py3-none-any.whl"
    assert tag in built.name
    install = ["-m", "pip", "install", "--constraint", str(ROOT / "constraints.txt"), str(built)]
    run(python, *install, folder=tmp_path)
    assert run(python, "-c", PROGRAM, folder=tmp_path, PATH=no_compiler) == f"{is_compiled} 2\n"
    version = run(str(tmp_path / "venv" / "bin" / "crossfade"), "--version", folder=tmp_path)
    assert version.endswith("(compiled)\n" if is_compiled else "(pure Python)\n")
