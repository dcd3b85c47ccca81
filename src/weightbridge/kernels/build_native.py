"""Builds the C kernels (cffi, API mode, out of line). Run by setup.py; run by hand it builds next to this file."""

from pathlib import Path

from cffi import FFI

_FOLDER = Path(__file__).parent
# Later ones use earlier ones.
_PARTS = ("moves", "columns", "transposes", "casts", "native", "differences", "fair_sharing", "digests")
_HEADER = (_FOLDER / "native.h").read_text()

ffibuilder = FFI()
ffibuilder.cdef(_HEADER.split("/* BEGIN CDEF */")[1].split("/* END CDEF */")[0])
ffibuilder.set_source(
    "weightbridge.kernels._native",
    # Included as text: the module is then built from one generated file, wherever the build puts it.
    "".join([_HEADER, *((_FOLDER / f"{name}.c").read_text() for name in _PARTS)]),
    extra_compile_args=["-O3", "-std=gnu11", "-pthread"],
    extra_link_args=["-pthread"],
)

if __name__ == "__main__":
    ffibuilder.compile(tmpdir=str(_FOLDER.parents[1]), verbose=True)
