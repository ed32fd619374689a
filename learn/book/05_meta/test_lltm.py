import lltm
import pytest
import torch
from sample import assert_same_gradients, reference, sample_inputs


def test_compiles_for_training_as_one_graph():
    inputs = sample_inputs(requires_grad=True)
    assert_same_gradients(torch.compile(lltm.forward, fullgraph=True), inputs)


def test_exports_for_any_batch():
    class Step(torch.nn.Module):
        def forward(self, input, weights, bias, old_h, old_cell):
            return lltm.forward(input, weights, bias, old_h, old_cell)

    batch = torch.export.Dim("batch")
    dynamic = ({0: batch}, None, None, {0: batch}, {0: batch})
    program = torch.export.export(Step(), tuple(sample_inputs()), dynamic_shapes=dynamic)
    inputs = sample_inputs(batch=9)
    torch.testing.assert_close(program.module()(*inputs), reference(*inputs))


@pytest.mark.parametrize("batch", [0, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_opcheck(transposed, batch):
    inputs = sample_inputs(batch)
    if transposed:
        inputs = [tensor.t().contiguous().t() for tensor in inputs]
    input, weights, _, old_h, _ = inputs
    torch.library.opcheck(torch.ops.lltm.forward, inputs)
    _, new_cell, gates = torch.ops.lltm._forward_with_gates(*inputs)
    saved = new_cell, gates, input, weights, old_h
    torch.library.opcheck(torch.ops.lltm.backward, (old_h, old_h, *saved))
    inputs = [tensor.requires_grad_() for tensor in inputs]
    torch.library.opcheck(torch.ops.lltm._forward_with_gates, inputs)


def test_meta_refuses_what_the_kernel_refuses():
    inputs = [tensor.to("meta") for tensor in sample_inputs()]
    inputs[2] = inputs[2][:-1]
    with pytest.raises(RuntimeError, match=r"expected bias to have sizes \[15\], but got \[14\]"):
        lltm.forward(*inputs)
