"""The base class of the modules, for torch.fx."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.fx import Proxy

_module_call = nn.Module.__call__


class _Call:
    """Chooses what a call runs, as a descriptor: no frame stands around nn.Module's own.

    torch.compile begins behind that one, so a frame here would be compiled with the hooks of the
    module, and all modules would share its limit of recompilations.
    """

    def __get__(self, module: nn.Module | None, owner: type) -> Callable[..., Any]:
        if module is None:
            return nn.Module.__call__
        # A tracer of torch.fx replaces the __call__ of all modules while it traces.
        if nn.Module.__call__ is not _module_call:
            return partial(_put_into_graph, module)
        return _module_call.__get__(module)  # type: ignore[no-any-return]


class LeafModule(nn.Module):
    """A module whose calls torch.fx puts into its graph as they are, like those of torch.nn.

    A tracer finds modules of torch.nn by the name of the file that they are from, and would trace
    the inside of any other module: its hooks, and the forward() of a subclass.
    """

    __call__ = _Call()


def _put_into_graph(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    proxy = _first_proxy((args, kwargs))
    if proxy is None:
        return nn.Module.__call__(module, *args, **kwargs)
    tracer: Any = proxy.tracer
    return tracer.create_proxy("call_module", tracer.path_of_module(module), args, kwargs)


def _first_proxy(value: Any) -> Proxy | None:
    if isinstance(value, Proxy):
        return value
    values = value.values() if isinstance(value, dict) else value
    if isinstance(value, (tuple, list, dict)):
        return next((p for p in map(_first_proxy, values) if p is not None), None)
    return None
