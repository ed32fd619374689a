import sys

import lltm
import torch
from sample import reference, sample_inputs


def test_python_makes_one_call():
    calls = []
    inputs = sample_inputs()
    sys.setprofile(lambda _, event, what: event == "c_call" and calls.append(what.__name__))
    lltm.forward(*inputs)
    sys.setprofile(None)
    assert calls[:-1] == ["forward"]  # the last is setprofile


def test_values():
    torch.testing.assert_close(lltm.forward(*sample_inputs()), reference(*sample_inputs()))
