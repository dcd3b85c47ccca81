"""Builds the optional C kernels; everything else is in pyproject.toml.

Without a working compiler, or without cffi at build time, the installation succeeds and the library falls back to its
NumPy kernels with one warning.
"""

from typing import Any

from setuptools import setup
from setuptools.command.build_ext import build_ext


class OptionalBuildExt(build_ext):
    """Turns a failure to compile into a warning."""

    def finalize_options(self) -> None:
        super().finalize_options()
        for extension in self.extensions or ():
            extension.optional = True


arguments: dict[str, Any] = {}
try:
    import cffi  # noqa: F401
except ImportError:
    print("cffi is not installed: the native kernels are not built")
else:
    arguments["cffi_modules"] = ["src/weightbridge/kernels/build_native.py:ffibuilder"]

setup(cmdclass={"build_ext": OptionalBuildExt}, **arguments)
