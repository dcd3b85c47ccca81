"""What may not be in this repository, and what its packaging files promise."""

from __future__ import annotations

import ast
import os
import re
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "weightbridge"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]

# Written in pieces, so that this file does not find itself.
_HOSTS = ("pypi" + ".org", "pythonhosted" + ".org", "download." + "pytorch", "registry." + "npmjs", "deb." + "debian")
_PLACES = ("/" + "work/", "../" + "shared")
_SKIPPED = {"build", "dist", "__pycache__"}
_TEXT = {".py", ".md", ".toml", ".txt", ".c", ".h", ".sh", ".json", ".cfg", ".yml", ".yaml", ""}


def _texts() -> list[Path]:
    found = []
    for folder, folders, files in os.walk(ROOT):
        # Hidden folders are caches, the virtual environment and git's own: not entered, they hold many files.
        folders[:] = [f for f in folders if f == ".ci" or not (f.startswith(".") or f in _SKIPPED)]
        found += [
            Path(folder, file) for file in files if Path(file).suffix in _TEXT and not file.startswith(".coverage")
        ]
    return found


def _sources() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def test_no_file_names_a_registry_host_or_a_place_outside_the_repository() -> None:
    files = _texts()
    assert {"pyproject.toml", "Makefile", "README.md", "run"} <= {f.name for f in files}
    found = [
        f"{file.relative_to(ROOT)}: {word}"
        for file in files
        for text in [file.read_text(errors="replace")]
        for word in (*_HOSTS, *_PLACES)
        if word in text
    ]
    assert found == []


@cache
def _nodes(file: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(file.read_text())))


def _imports(file: Path) -> set[str]:
    found = set()
    for node in _nodes(file):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def test_nothing_under_src_can_run_code_that_came_in_as_data() -> None:
    unsafe = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve"}
    found = {
        str(f.relative_to(ROOT)): bad for f in _sources() if (bad := {i.split(".")[0] for i in _imports(f)} & unsafe)
    }
    calls = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in _sources()
        for node in _nodes(file)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"eval", "exec"}
    ]
    # torch.distributed pickles in its *_object_* collectives, pyzmq in send_pyobj and recv_pyobj.
    pickling = re.compile(r"\b(\w+_object(_list)?|gather_object|send_pyobj|recv_pyobj|torch\.load)\(")
    hidden = [
        f"{file.relative_to(ROOT)}: {match.group()}"
        for file in _sources()
        for match in pickling.finditer(file.read_text())
    ]
    assert (found, calls, hidden) == ({}, [], [])


def test_source_asserts_nothing() -> None:
    # An assert disappears under -O; user errors are classes of errors.py. The published test kit is tests.
    found = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in _sources()
        if "testing" not in file.parts
        for node in _nodes(file)
        if isinstance(node, ast.Assert)
    ]
    assert found == []


_MODULE_OF = {"pyzmq": "zmq"}
_WITH_EXTRAS = {"cli", "integrations", "kernels", "observability", "simulator", "testing"}


def _modules_of(requirements: list[str]) -> set[str]:
    names = [re.split(r"[<>=!~;\[ ]", r, maxsplit=1)[0] for r in requirements]
    return {_MODULE_OF.get(n, n).replace("-", "_") for n in names}


def test_every_third_party_import_is_a_declared_dependency() -> None:
    core = _modules_of(PROJECT["dependencies"])
    extras = _modules_of([r for rs in PROJECT["optional-dependencies"].values() for r in rs])
    known = set(sys.stdlib_module_names) | {"weightbridge", "__future__"}
    undeclared: dict[str, set[str]] = {}
    for file in _sources():
        layer = file.relative_to(SOURCE).parts[0]
        allowed = known | core | (extras if layer in _WITH_EXTRAS else set())
        if bad := {name.split(".")[0] for name in _imports(file)} - allowed:
            undeclared[str(file.relative_to(ROOT))] = bad
    assert undeclared == {}


def test_every_direct_dependency_is_pinned_by_the_constraints() -> None:
    lines = (ROOT / "requirements" / "constraints.txt").read_text().splitlines()
    pinned = {re.split(r"==", line)[0].lower() for line in lines if "==" in line}
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    direct = {re.split(r"[<>=!~;\[ ]", r, maxsplit=1)[0].lower() for rs in groups for r in rs}
    assert direct - pinned == set()


def _supported_pythons() -> list[str]:
    found = [re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", c) for c in PROJECT["classifiers"]]
    return [match[1] for match in found if match]


def test_the_oldest_python_is_the_same_wherever_it_is_named() -> None:
    # ruff's target finds newer syntax, mypy's version finds newer parts of the standard library.
    oldest = _supported_pythons()[0]
    assert PROJECT["requires-python"] == f">={oldest}"
    assert PYPROJECT["tool"]["ruff"]["target-version"] == "py" + oldest.replace(".", "")
    assert PYPROJECT["tool"]["mypy"]["python_version"] == oldest
    compared = oldest.replace(".", ", ")
    assert f"sys.version_info >= ({compared})" in (ROOT / "scripts" / "setup.sh").read_text()
    for page in ("README.md", "CONTRIBUTING.md"):
        assert f"Python {oldest} or newer" in (ROOT / page).read_text()


def test_no_version_is_pinned_for_a_python_on_which_it_does_not_install() -> None:
    # Asks the releases that are installed here; the others are judged where they are.
    refused: list[str] = []
    asked = set()
    for line in (ROOT / "requirements" / "constraints.txt").read_text().splitlines():
        if not (text := line.split("#")[0].strip()):
            continue
        pin = Requirement(text)
        try:
            release = metadata(pin.name)
        except PackageNotFoundError:
            continue
        if not pin.specifier.contains(release["Version"]):
            continue
        asked.add(pin.name)
        allowed = SpecifierSet(release["Requires-Python"] or "")
        refused += [
            f"{text} on Python {python}: the release asks for {allowed}"
            for python in _supported_pythons()
            if pin.marker is None or pin.marker.evaluate({"python_version": python})
            if not allowed.contains(f"{python}.99")
        ]
    assert {"msgspec", "mypy", "pytest", "torch"} <= asked
    assert refused == []


def test_the_distribution_is_named_and_licensed_as_the_readme_says() -> None:
    readme = (ROOT / "README.md").read_text()
    assert PROJECT["name"] == "weightbridge-rl"
    assert "pip install weightbridge-rl" in readme
    assert PROJECT["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text()
