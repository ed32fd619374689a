"""Compiles sources of the book just in time, and loads the library."""

from pathlib import Path

from torch.utils.cpp_extension import load

BOOK = Path(__file__).parent
INCLUDE = [str(BOOK / name) for name in ("04_backward", "06_autograd", "09_kernel")]


def build(*sources: str, flags: tuple[str, ...] = (), name: str = "book") -> None:
    """Loads a library of these sources, such as "05_meta/lltm_meta.cpp".

    Chapters share the name, so a source that the chapter before has compiled is not compiled again.
    """
    load(
        name,
        [str(BOOK / source) for source in sources],
        extra_cflags=["-O3", *flags],
        extra_cuda_cflags=["-O3", "--expt-relaxed-constexpr"],
        extra_include_paths=INCLUDE,
        is_python_module=False,
    )
