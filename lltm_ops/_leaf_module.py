"""The base class of the modules, for torch.fx."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.fx import Proxy

_module_call = nn.Module.__call__


class LeafModule(nn.Module):
    """A module whose calls torch.fx puts into its graph as they are, like those of torch.nn.

    A tracer finds modules of torch.nn by the name of the file that they are from, and would trace
    the inside of any other module: its hooks, and the forward() of a subclass.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A tracer replaces the __call__ of all modules while it traces. This comparison takes less
        # time than a look at each argument.
        if nn.Module.__call__ is not _module_call:
            proxy = _first_proxy((args, kwargs))
            if proxy is not None:
                path = proxy.tracer.path_of_module(self)  # type: ignore[attr-defined]
                return proxy.tracer.create_proxy("call_module", path, args, kwargs)
        return super().__call__(*args, **kwargs)


def _first_proxy(value: Any) -> Proxy | None:
    if isinstance(value, Proxy):
        return value
    values = value.values() if isinstance(value, dict) else value
    if isinstance(value, (tuple, list, dict)):
        return next((p for p in map(_first_proxy, values) if p is not None), None)
    return None
