"""The three storeys: what an import loads, read in a fresh interpreter, and what the sources name."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ABOVE = {"costmodels": {"passes", "autopar"}, "passes": {"autopar"}}
PUBLIC = {"AutoparError", "BadInput", "CaptureError", "Cluster", "NoPlanFits", "Plan", "PlanMismatch", "parallelize"}

IMPORT_ALL_OF = """
import importlib, pkgutil
def import_all_of(name):
    module = importlib.import_module(name)
    for one in pkgutil.walk_packages(getattr(module, "__path__", ()), name + "."):
        if not one.name.endswith("__main__"):
            importlib.import_module(one.name)
"""


def fresh(code: str) -> str:
    """What `code` prints in an interpreter that has imported nothing yet."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded_by(code: str) -> set[str]:
    """The top-level modules that `code` loads."""
    names = fresh(f"{code}\nimport json, sys; print(json.dumps(sorted(sys.modules)))").splitlines()[-1]
    return {name.split(".")[0] for name in json.loads(names)}


def imports_in(storey: str) -> Iterator[tuple[str, str]]:
    """Every import statement below a folder, also those inside functions, as (file:line, top-level module)."""
    for file in sorted((ROOT / storey).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            where = f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import):
                yield from ((where, alias.name.split(".")[0]) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield where, node.module.split(".")[0]


@pytest.mark.parametrize("storey", ABOVE)
def test_every_module_of_a_storey_loads_nothing_from_above(storey: str) -> None:
    assert not loaded_by(f"{IMPORT_ALL_OF}import_all_of({storey!r})") & ABOVE[storey]


@pytest.mark.parametrize("storey", ABOVE)
def test_no_function_of_a_storey_imports_from_above(storey: str) -> None:
    assert [(where, name) for where, name in imports_in(storey) if name in ABOVE[storey]] == []


def test_runtime_loads_no_compiler_and_no_solver() -> None:
    loaded = loaded_by(f"{IMPORT_ALL_OF}import_all_of('autopar.runtime')")
    assert "torch" in loaded
    assert not loaded & {"passes", "costmodels", "ortools", "networkx"}


def test_import_of_autopar_loads_neither_torch_nor_another_storey() -> None:
    assert not loaded_by("import autopar") & {"torch", "passes", "costmodels", "ortools", "networkx"}


def test_all_is_what_autopar_resolves() -> None:
    """Also with every submodule loaded, since a submodule hides a public name that it shares."""
    names = fresh(f"""{IMPORT_ALL_OF}
import json, types
import_all_of("autopar")
import autopar

assert len(set(autopar.__all__)) == len(autopar.__all__), "a name stands twice in __all__"
for name in autopar.__all__:
    assert not isinstance(getattr(autopar, name), types.ModuleType), f"autopar.{{name}} is a module"
ours = {{"autopar", "passes", "costmodels"}}
for name, value in vars(autopar).items():
    if not name.startswith("_") and getattr(value, "__module__", "").split(".")[0] in ours:
        assert name in autopar.__all__, f"autopar.{{name}} is not in __all__"
assert not hasattr(autopar, "no_such_name")
print(json.dumps(autopar.__all__))""")
    assert set(json.loads(names)) >= PUBLIC
