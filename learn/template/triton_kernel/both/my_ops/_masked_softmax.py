# The kernels for GPUs, unless there is no Triton: a torch for the CPU brings none.
try:
    from my_ops import _triton
except ModuleNotFoundError as error:
    if error.name != "triton":
        raise
else:
    _triton.register("masked_softmax_forward", _triton.forward)
    _triton.register("masked_softmax_backward", _triton.backward)
