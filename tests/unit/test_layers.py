"""The layers are what docs/architecture.md says, the import contracts say the same, and the pure ones stay pure."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "weightbridge"
PURE = ("errors", "geometry", "checkpoint", "layout", "plan", "program", "machine")


def _contracts() -> dict[str, dict[str, object]]:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return {c["id"]: c for c in data["tool"]["importlinter"]["contracts"]}


def _layers_lowest_first() -> list[str]:
    layers = _contracts()["layers"]["layers"]
    assert isinstance(layers, list)
    return [name.strip("()") for name in reversed(layers)]


def _modules(package: str) -> list[str]:
    root = PACKAGE / package
    files = sorted(root.rglob("*.py")) if root.is_dir() else [PACKAGE / f"{package}.py"]
    names = []
    for file in files:
        parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def test_importing_the_pure_layers_and_the_top_package_leaves_torch_out() -> None:
    modules = ["weightbridge", *(m for package in PURE for m in _modules(package))]
    assert len(modules) > len(PURE)
    code = (
        f"import importlib, sys; sys.path.insert(0, {str(ROOT / 'src')!r})\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "print(sorted({'torch', 'zmq', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_the_architecture_page_lists_the_layers_in_the_order_of_the_contract() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page.split("<!-- layers -->")[1].split("<!-- /layers -->")[0]
    listed = re.findall(r"^\| `([a-z_]+)(?:\.py|/)` \|", table, flags=re.MULTILINE)
    assert listed == _layers_lowest_first()


def test_every_package_is_a_layer() -> None:
    found = {p.name for p in PACKAGE.iterdir() if (p / "__init__.py").exists()}
    found |= {p.stem for p in PACKAGE.glob("*.py") if p.stem != "__init__"}
    assert found <= set(_layers_lowest_first())


def test_the_contract_on_purity_covers_the_layers_up_to_the_machine() -> None:
    layers = _layers_lowest_first()
    assert layers[: layers.index("machine") + 1] == list(PURE)
    assert _contracts()["pure"]["source_modules"] == [f"weightbridge.{name}" for name in PURE]
    assert "torch" in _contracts()["pure"]["forbidden_modules"]  # type: ignore[operator]


def _environment_reads(tree: ast.Module) -> list[int]:
    return [
        node.lineno
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv", "perf_counter", "monotonic"})
        or (isinstance(node, ast.ImportFrom) and node.module in {"os", "time"})
    ]


def test_the_pure_layers_read_no_environment_variable() -> None:
    # The import contract cannot say this: checkpoint/ may import os to read files.
    found = [
        f"{file.relative_to(ROOT)}:{line}"
        for package in PURE
        for file in ((PACKAGE / package).rglob("*.py") if (PACKAGE / package).is_dir() else [PACKAGE / f"{package}.py"])
        for line in _environment_reads(ast.parse(file.read_text()))
    ]
    assert found == []


def test_source_files_stay_within_800_lines() -> None:
    long = {str(f.relative_to(ROOT)): n for f in PACKAGE.rglob("*.py") if (n := len(f.read_text().splitlines())) > 800}
    assert long == {}
