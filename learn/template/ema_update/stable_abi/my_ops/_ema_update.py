"""The function, and what the stable ABI cannot say of its operator, which writes into the state."""

import torch
from torch import Tensor
from torch.autograd import forward_ad

from my_ops import _arguments, _library

op = _library.load().ema_update_.default
library = torch.library.Library("my_ops", "FRAGMENT")  # what it registers ends with it


@torch.library.register_fake("my_ops::ema_update_")
def _(state, input, decay):
    _arguments.check_type("ema_update_", "state", state)
    _arguments.check_like("ema_update_", "input", input, state.dtype, "state", state)


def refuse_gradients(keys, state, *others):
    """Nothing differentiates the operator: the gradient of a state would be silently wrong."""
    _arguments.check_type("ema_update_", "state", state)
    recorded = torch.is_grad_enabled() and state.requires_grad
    tangent = forward_ad._current_level >= 0 and forward_ad.unpack_dual(state).tangent is not None
    if recorded or tangent:
        _arguments.refuse("ema_update_", "a state that needs no gradient, but got one that does")
    op.redispatch(keys & torch._C._after_autograd_keyset, state, *others)


def count_the_write(keys, state, *others):
    """A backward that saved the state then raises, and does not take the new one for the old."""
    op.redispatch(keys & torch._C._after_ADInplaceOrView_keyset, state, *others)
    torch.autograd.graph.increment_version(state)


library.impl("ema_update_", refuse_gradients, "Autograd", with_keyset=True)
library.impl("ema_update_", count_the_write, "ADInplaceOrView", with_keyset=True)


@torch.library.register_vmap("my_ops::ema_update_")
def _(info, in_dims, *inputs):
    if in_dims[0] is None:
        _arguments.refuse("ema_update_", "a state for each example of vmap, but got one for all")
    op(*_arguments.batched(info, in_dims, inputs))
    return None, None


def ema_update_(state: Tensor, input: Tensor, decay: float) -> Tensor:
    """Makes the state ``decay * state + (1 - decay) * input``, in place, and returns it.

    Works with ``torch.compile``, ``torch.export`` and ``torch.vmap``. It has no derivatives.

    Args:
        state: of any strides, float64, float32, bfloat16 or float16. It needs no gradient, and each
            element has memory of its own.
        input: of the shape, dtype and device of ``state``, with which it shares no memory. As for
            the running mean of a batch norm, no gradient goes back to it.
        decay: how much of the state is kept.

    Raises:
        RuntimeError: if the arguments do not fit; the sentence says which, and why.
    """
    op(state, input, decay)
    return state
