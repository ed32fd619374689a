#include <torch/csrc/stable/library.h>

// The operators alone have no derivatives: my_ops/_autograd.py calls them, and has these.
STABLE_TORCH_LIBRARY(my_ops, m) {
  m.def("swiglu_forward(Tensor gate, Tensor value) -> Tensor");
  m.def("swiglu_backward(Tensor grad, Tensor gate, Tensor value) -> (Tensor, Tensor)");
}
