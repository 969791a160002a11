"""`lopd_fast.kernels` is found however the checkout is installed or run, next to a package named `kernels` too."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import lopd_fast

ROOT = Path(__file__).resolve().parent.parent

PROBE = """
from lopd_fast.kernels.probe import VALUE
assert VALUE == 7
"""
WITH_NAMESAKE = PROBE + "import kernels; assert kernels.NAMESAKE, 'the checkout shadows the other package'\n"
SPAWN = """
import multiprocessing
from lopd_fast.kernels import probe

def work():
    exec(CODE)

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=work)
    process.start()
    process.join()
    raise SystemExit(process.exitcode)
"""


def test_distribution_name_version_and_command():
    distribution = importlib.metadata.distribution("lopd-fast")
    assert distribution.version == lopd_fast.__version__
    commands = {entry.name: entry.value for entry in distribution.entry_points}
    assert commands == {"lopd-fast": "lopd_fast.cli:main"}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is packaged, without a README, plus one kernel file that imports nothing."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("setup.py", "pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    for name in ("lopd_fast", "kernels"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "kernels" / "probe.py").write_text("VALUE = 7\n")
    return folder


@pytest.fixture(scope="module")
def namesake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds another package named `kernels`."""
    folder = tmp_path_factory.mktemp("namesake")
    (folder / "kernels").mkdir()
    (folder / "kernels" / "__init__.py").write_text("NAMESAKE = True\n")
    return folder


def python(*arguments: str, cwd: Path, path: tuple[Path, ...] = ()) -> None:
    """Run a new interpreter without site-packages (-S), so that no installed lopd_fast can help."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    command = [sys.executable, "-S", *arguments]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def install(checkout: Path, *arguments: str) -> None:
    """Install the checkout with pip, offline: no dependencies, and setuptools from this environment."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-deps"]
    command += ["--no-build-isolation", "--ignore-installed", *arguments]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_wheel(checkout: Path, namesake: Path, tmp_path: Path):
    wheel = tmp_path / "wheel"
    install(checkout, "--target", str(wheel), ".")
    assert (wheel / "lopd_fast" / "py.typed").exists()
    assert not (wheel / "kernels").exists()
    here = f"import lopd_fast.kernels.probe as p; assert p.__file__.startswith({str(wheel)!r}), p.__file__\n"
    python("-c", PROBE + here, cwd=tmp_path, path=(wheel,))
    python("-c", WITH_NAMESAKE + here, cwd=tmp_path, path=(wheel, namesake))


def test_editable_install(checkout: Path, namesake: Path, tmp_path: Path):
    install(checkout, "--prefix", str(tmp_path), "-e", ".")
    # addsitedir obeys the .pth files, as an interpreter does with its own site-packages when it starts
    site = f"import site; site.addsitedir({str(next(tmp_path.rglob('site-packages')))!r})\n"
    here = (
        f"import lopd_fast.kernels.probe as p; assert p.__file__.startswith({str(checkout)!r}), p.__file__\n"
    )
    for folder in (tmp_path, checkout):
        python("-c", site + PROBE + here, cwd=folder)
        python("-c", site + WITH_NAMESAKE + here, cwd=folder, path=(namesake,))


def test_run_from_the_root_without_install(checkout: Path, namesake: Path):
    python("-c", PROBE, cwd=checkout)
    python("-c", WITH_NAMESAKE, cwd=checkout, path=(namesake,))


def test_spawned_process(checkout: Path, namesake: Path):
    for code, path in ((PROBE, ()), (WITH_NAMESAKE, (namesake,))):
        (checkout / "spawn.py").write_text(SPAWN.replace("CODE", repr(code)))
        python("spawn.py", cwd=checkout, path=path)


@pytest.mark.slow
def test_transformers_and_peft_import_from_the_root():
    # Both probe for a package named `kernels`; the folder of that name must not be taken for it.
    code = "import transformers, peft; from transformers import AutoModelForCausalLM"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
