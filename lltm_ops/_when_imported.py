"""Registers with parts of PyTorch that few programs import, when they are imported.

Importing them here would slow every program down: torch.distributed.tensor takes half as long as
``import torch``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


def register_when_imported(registrations: dict[str, Callable[[], None]]) -> None:
    """Calls the function of each module once the module is imported.

    This package may be imported again, and so may the modules, so a function may run again.
    """
    finder = _LLTMOpsFinder(registrations)
    # Compared by name, because an earlier import of this package had a class of its own. The finder
    # stays: an import may fail and be repeated, and another thread may iterate over the list.
    if all(type(other).__qualname__ != _LLTMOpsFinder.__qualname__ for other in sys.meta_path):
        sys.meta_path.insert(0, finder)
    for name, register in registrations.items():
        if name in sys.modules:
            register()


class _LLTMOpsFinder(MetaPathFinder):
    def __init__(self, registrations: dict[str, Callable[[], None]]) -> None:
        self.registrations = registrations

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        register = self.registrations.get(name)
        spec = PathFinder.find_spec(name, path, target) if register else None
        if register is None or spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            register()

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
