"""The tree's rules: imports run one way, importing the package is light, `kernels/` is never a top-level package."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import lopd_fast

ROOT = Path(__file__).resolve().parent.parent

# Low may not reach high, on any path. Modules that are not named here may sit between any two layers.
LAYERS = [
    {"losses", "loss_rows", "fused_linear", "qformer"},
    {"backbone", "teacher", "student", "composer"},
    {"trainer"},
    {"cli", "commands"},
]
KERNEL_IMPORTS = {"torch", "triton", "math", "__future__"}
IMPORTED_BY_NOBODY = {"kernels", "bench", "tests", "examples"}


def module_name(path: Path) -> str:
    """The import name of a file: kernels/x.py is lopd_fast.kernels.x."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] == "kernels":
        parts = ("lopd_fast", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> set[str]:
    """Dotted names that a file imports, with relative ones resolved; `from a import b` gives a.b."""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, *(node.module.split(".") if node.module else [])]
            found |= {".".join([*base, alias.name]) for alias in node.names}
    return found


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


PACKAGE = {module_name(path): imports_of(path) for path in python_files("lopd_fast", "kernels")}


def edges() -> dict[str, set[str]]:
    """Module -> the modules of the package that it imports, found by the longest name that is a module."""
    graph: dict[str, set[str]] = {}
    for module, imported in PACKAGE.items():
        graph[module] = set()
        if module == "lopd_fast":  # its lazy public names reach everything, by design
            continue
        for name in imported:
            while name and name not in PACKAGE:
                name = name.rpartition(".")[0]
            if name and name != module:
                graph[module].add(name)
    return graph


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    queue = [start]
    while queue:
        fresh = graph[queue.pop()] - seen
        seen |= fresh
        queue += fresh
    return seen


def rank(module: str) -> int | None:
    """Index into LAYERS of a module, or of the subpackage that it lies in."""
    name = module.removeprefix("lopd_fast.").split(".")[0]
    return next((index for index, layer in enumerate(LAYERS) if name in layer), None)


def test_imports_run_one_way():
    graph = edges()
    for module in graph:
        below = reachable(graph, module)
        assert module not in below, f"{module} imports itself through others"
        own = rank(module)
        if own is not None:
            wrong = {other for other in below if (rank(other) or 0) > own}
            assert not wrong, f"{module} reaches up to {sorted(wrong)}"


def test_package_takes_no_public_name_from_its_own_root():
    # `from lopd_fast import topk_tail_kl` inside the package would hide an edge from the test above.
    for module, imported in PACKAGE.items():
        roots = {name for name in imported if name.startswith("lopd_fast.") and name.count(".") == 1}
        assert module == "lopd_fast" or roots <= {*PACKAGE, "lopd_fast.__version__"}, module


def test_kernel_files_import_torch_triton_math_and_each_other():
    for path in python_files("kernels"):
        for name in imports_of(path):
            own = name.startswith("lopd_fast.kernels.")
            assert own or name.split(".")[0] in KERNEL_IMPORTS, f"{path.name} imports {name}"


def test_nobody_imports_kernels_bench_tests_or_examples():
    assert not (ROOT / "kernels" / "__init__.py").exists()
    folders = ["lopd_fast", "kernels", "bench", "tests", "examples"]
    for path in [*python_files(*folders), ROOT / "setup.py"]:
        wrong = {name for name in imports_of(path) if name.split(".")[0] in IMPORTED_BY_NOBODY}
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


def test_repository_root_is_not_on_the_path():
    assert str(ROOT) not in [os.path.abspath(entry) for entry in sys.path]


def test_import_is_light(tmp_path: Path):
    heavy = ["torch", "triton", "transformers", "peft", "faiss", "numpy"]
    code = f"import sys, lopd_fast, lopd_fast.errors; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_public_names_load_and_unknown_ones_do_not():
    for name in lopd_fast.__all__:
        assert getattr(lopd_fast, name) is not None, name
    assert set(lopd_fast.__all__) <= set(dir(lopd_fast))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = lopd_fast.no_such_name  # pyright: ignore[reportAttributeAccessIssue]
