"""Registers with parts of PyTorch that few programs import, when they are imported.

Importing them here would slow every program down: torch.distributed.tensor takes half as long as
``import torch``.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


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
        self.thread = threading.local()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        register = self.registrations.get(name)
        # Another finder may ask all others, too, and so this one again.
        if register is None or getattr(self.thread, "asks_others", False):
            return None
        self.thread.asks_others = True
        try:
            # A bundled program finds its modules by a finder of its own, and not on a path.
            others = (getattr(other, "find_spec", None) for other in sys.meta_path)
            specs = (find_spec(name, path, target) for find_spec in others if find_spec)
            spec: ModuleSpec | None = next((spec for spec in specs if spec is not None), None)
        finally:
            self.thread.asks_others = False
        if spec is None or not hasattr(spec.loader, "exec_module"):
            return None
        spec.loader = _LLTMOpsLoader(spec.loader, register)
        return spec


class _LLTMOpsLoader(Loader):
    """Registers after the loader that it stands for, which may load other modules, too."""

    def __init__(self, loader: Any, register: Callable[[], None]) -> None:
        self.loader = loader
        self.register = register

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self).get("loader"), name)  # what a probe asks of a loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = module.__spec__.loader = self.loader  # type: ignore[union-attr]
        self.loader.exec_module(module)
        self.register()
