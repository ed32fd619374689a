#include <torch/csrc/stable/library.h>

// The operators alone have no derivatives: my_ops/_masked_softmax.py calls them, and has these.
STABLE_TORCH_LIBRARY(my_ops, m) {
  m.def("masked_softmax_forward(Tensor scores, Tensor mask) -> Tensor");
  m.def("masked_softmax_backward(Tensor grad, Tensor scores, Tensor mask) -> Tensor");
}
