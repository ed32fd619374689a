@each_device
@each_dtype
@pytest.mark.parametrize("op", ["masked_softmax", "masked_softmax_backward"])
def test_opcheck(device, dtype, op):
    inputs = arguments(device, dtype)
    grad = [torch.randn_like(inputs[0], requires_grad=True)] * (op == "masked_softmax_backward")
    torch.library.opcheck(getattr(torch.ops.my_ops, op).default, (*grad, *inputs))


@each_device
@pytest.mark.skipif("sys.version_info >= (3, 14)", reason="TorchScript ends with Python 3.13")
def test_torchscript(device):
    inputs = arguments(device)
    scripted = torch.jit.script(masked_softmax)
    torch.testing.assert_close(scripted(*inputs), masked_softmax(*inputs))
    assert scripted(*inputs).requires_grad
    with pytest.raises(Exception, match=r"my_ops::masked_softmax: expected mask to be"):
        scripted(inputs[0], inputs[1][0])
