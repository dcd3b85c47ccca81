"""The public names are pinned: a change of one shows as a change of public_names.txt.

Write the file anew with `python tests/repository/test_public_names.py`.
"""

from __future__ import annotations

import ast
import pickle
from pathlib import Path

import pytest

import weightbridge
from weightbridge import errors

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
PINNED = Path(__file__).with_name("public_names.txt")


def _declared(file: Path) -> list[str]:
    """The literal `__all__` of a module, read without importing it; [] where it has none."""
    for node in ast.parse(file.read_text()).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(t, ast.Name) and t.id == "__all__" for t in targets):
            return list(ast.literal_eval(node.value))  # type: ignore[attr-defined]
    return []


def _snapshot() -> str:
    """One line a public name: `package name`. Packages in the order of their paths."""
    lines = []
    for file in [SOURCE / "weightbridge" / "errors.py", *sorted(SOURCE.rglob("__init__.py"))]:
        parts = file.relative_to(SOURCE).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        lines += [f"{module} {name}" for name in sorted(_declared(file))]
    return "\n".join(lines) + "\n"


def test_public_names_are_the_pinned_ones() -> None:
    assert _snapshot().splitlines() == PINNED.read_text().splitlines()


def test_version_is_the_distribution_s() -> None:
    assert weightbridge.__version__ == "0.1.0"


@pytest.mark.parametrize("name", weightbridge.__all__)
def test_every_top_level_name_resolves(name: str) -> None:
    assert getattr(weightbridge, name) is not None
    assert name in dir(weightbridge)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Manager'"):
        weightbridge.Manager  # noqa: B018


def test_star_import_gives_what_is_declared() -> None:
    names: dict[str, object] = {}
    exec("from weightbridge import *", names)
    assert set(weightbridge.__all__) <= set(names)


ERRORS = [name for name in errors.__all__ if not name.endswith("Warning")]


def test_warnings_are_public_at_the_top_and_can_be_filtered_as_user_warnings() -> None:
    assert set(errors.__all__) - set(ERRORS) == {"IrregularLayoutWarning"}
    assert issubclass(weightbridge.IrregularLayoutWarning, UserWarning)


@pytest.mark.parametrize("name", ERRORS)
def test_every_error_is_public_at_the_top_and_descends_from_the_root(name: str) -> None:
    assert getattr(weightbridge, name) is getattr(errors, name)
    assert issubclass(getattr(errors, name), weightbridge.WeightBridgeError)


@pytest.mark.parametrize("name", ERRORS)
def test_every_error_pickles_with_its_fields(name: str) -> None:
    cls = getattr(errors, name)
    got = pickle.loads(pickle.dumps(cls("what to do", tensor="w", needed_bytes=3, causes={"a/0": "died"})))
    assert type(got) is cls
    assert str(got) == got.message == "what to do"
    assert (got.tensor, got.needed_bytes, got.causes) == ("w", 3, {"a/0": "died"})


def test_the_error_tree_is_sorted_by_remedy() -> None:
    parents = {name: getattr(errors, name).__mro__[1].__name__ for name in ERRORS}
    assert parents == {
        "WeightBridgeError": "Exception",
        "LayoutError": "WeightBridgeError",
        "SpecError": "LayoutError",
        "ProbeError": "LayoutError",
        "CoverageError": "LayoutError",
        "PlanError": "WeightBridgeError",
        "InfeasibleError": "PlanError",
        "UnsupportedError": "PlanError",
        "TransportError": "WeightBridgeError",
        "ConnectError": "TransportError",
        "RegistrationError": "TransportError",
        "TransferTimeout": "TransportError",
        "WorkerError": "WeightBridgeError",
        "CorruptionError": "WorkerError",
        "IncompleteUpdateError": "WeightBridgeError",
        "UsageError": "WeightBridgeError",
        "InternalError": "WeightBridgeError",
    }


def test_only_what_may_help_a_second_time_is_retryable() -> None:
    retryable = {n for n in errors.__all__ if getattr(getattr(errors, n), "retryable", False)}
    assert retryable == {"ConnectError", "TransferTimeout"}


if __name__ == "__main__":
    PINNED.write_text(_snapshot())
