#include <torch/csrc/stable/library.h>

// The operators alone have no derivatives: my_ops/_segment_sum.py calls them, and has these.
// The rows of backward's result cannot be known from the sizes of its tensors.
STABLE_TORCH_LIBRARY(my_ops, m) {
  m.def("segment_sum_forward(Tensor values, Tensor lengths, float decay) -> Tensor");
  m.def("segment_sum_backward(Tensor grad, Tensor lengths, float decay, SymInt rows) -> Tensor");
}
