import sys

import lltm
import pytest
import torch
from sample import reference, sample_inputs


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="torch.jit.script ends with Python 3.13")
def test_scripts():
    @torch.jit.script
    def step(input, weights, bias, old_h, old_cell):
        return lltm.forward(input, weights, bias, old_h, old_cell)

    torch.testing.assert_close(step(*sample_inputs()), reference(*sample_inputs()))


def test_from_python():
    torch.testing.assert_close(lltm.forward(*sample_inputs()), reference(*sample_inputs()))


def test_wrong_arguments_are_refused():
    """The schema refuses the wrong types; the kernel refuses the wrong sizes."""
    input, *rest = sample_inputs()
    with pytest.raises(
        RuntimeError, match=r"Expected a value of type 'Tensor' for argument 'input'"
    ):
        lltm.forward("input", *rest)
    with pytest.raises(RuntimeError, match=r"expected weights to have 9 columns, but got 8"):
        lltm.forward(torch.cat([input, input[:, :1]], 1), *rest)
