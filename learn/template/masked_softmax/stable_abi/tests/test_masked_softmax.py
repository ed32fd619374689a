OPS = [ops.masked_softmax_forward.default, ops.masked_softmax_backward.default]
each_op = pytest.mark.parametrize("op", OPS, ids=str)


def arguments_of(op, *options):
    inputs = arguments(*options)
    grad = [torch.randn_like(inputs[0])] * (len(op._schema.arguments) - len(inputs))
    return (*grad, *inputs)


@each_device
@each_dtype
@each_op
# The operators alone have no gradients: PyTorch warns whoever asks for them.
@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered:UserWarning")
def test_opcheck(device, dtype, op):
    torch.library.opcheck(op, arguments_of(op, device, dtype))


@each_device
@each_op
def test_vmap_of_the_operators_alone_is_no_loop(device, op):
    inputs = [tensor.detach() for tensor in arguments_of(op, device)]
    with torch.profiler.profile() as profile:
        actual = torch.vmap(op, in_dims=1)(*inputs)
    torch.testing.assert_close(actual, op(*(tensor.t() for tensor in inputs)))
    # The call to vmap's rule, and the rule's call to the kernel. A loop makes four of the latter.
    assert sum(event.name == op.name() for event in profile.events()) == 2


@each_device
@pytest.mark.parametrize("compiled", [False, True])
def test_autocast(device, compiled):
    def in_region(*inputs):
        with torch.autocast(device, torch.bfloat16):
            return masked_softmax(*inputs)

    function = torch.compile(in_region, fullgraph=True) if compiled else in_region
    # The loss and its gradients are outside of the region, as in a training loop.
    inputs = arguments(device, torch.float32)
    actual = with_gradients(function, inputs)
    halves = [tensor.bfloat16() if tensor.requires_grad else tensor for tensor in inputs]
    expected = with_gradients(masked_softmax, halves)
    torch.testing.assert_close(actual, expected, check_dtype=False)
    assert (actual[0].dtype, actual[1].dtype) == (torch.bfloat16, torch.float32)
