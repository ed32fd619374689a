#include <torch/csrc/stable/library.h>

// (a!) says that the call writes into state, and -> () that it returns no alias of it, which
// torch.compile would refuse.
STABLE_TORCH_LIBRARY(my_ops, m) {
  m.def("ema_update_(Tensor(a!) state, Tensor input, float decay) -> ()");
}
