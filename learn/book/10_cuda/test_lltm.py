import shutil

import lltm
import pytest
import torch
from sample import reference, sample_inputs
from torch.utils.cpp_extension import CUDA_HOME

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc on PATH")
needs_cuda = pytest.mark.skipif(
    CUDA_HOME is None or torch.version.cuda is None, reason="needs a torch with CUDA and a toolkit"
)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@needs_nvcc
def test_compiles_without_a_gpu(tmp_path):
    lltm.compile_only(str(tmp_path / "lltm_cuda.o"))


@needs_cuda
@pytest.mark.parametrize("name", ["forward", "_forward_with_gates", "backward"])
def test_kernels_are_registered(name):
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"lltm::{name}", "CUDA")


@needs_gpu
@pytest.mark.parametrize("batch", [0, 1, 700])
def test_values_and_gradients(batch):
    inputs = [tensor.cuda().detach() for tensor in sample_inputs(batch=batch, state_size=300)]
    torch.testing.assert_close(lltm.forward(*inputs), reference(*inputs))
    small = [tensor.cuda().detach().requires_grad_() for tensor in sample_inputs()]
    assert torch.autograd.gradcheck(lltm.forward, small)
    torch.library.opcheck(torch.ops.lltm.forward, small)


@needs_gpu
def test_runs_on_the_current_stream_and_in_a_graph():
    inputs = [tensor.cuda().detach() for tensor in sample_inputs(dtype=torch.float32)]
    lltm.forward(*inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = lltm.forward(*inputs)
    inputs[0].copy_(torch.ones_like(inputs[0]))
    graph.replay()
    torch.testing.assert_close(captured, reference(*inputs))
