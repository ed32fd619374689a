"""The base class of the modules, for torch.fx."""

from torch import nn


class LeafModule(nn.Module):
    """A module that tracers of torch.fx call as a whole, as they call those of torch.nn.

    Without this, a tracer would trace its inside: hooks and the forward() of a subclass, which the
    graph would then run once more, or operators that take no proxies.
    """

    def __init__(self) -> None:
        super().__init__()
        # By this name of an instance, not of its class, Tracer.is_leaf_module knows what is a leaf.
        self.__module__ = "torch.nn"
