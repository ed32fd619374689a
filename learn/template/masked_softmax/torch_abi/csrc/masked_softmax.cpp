#include "masked_softmax.h"

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <torch/library.h>

#include <limits>

namespace my_ops {
namespace {
void check_like(
    const char* op, const char* name, const Tensor& tensor, at::ScalarType type,
    const Tensor& scores) {
  TORCH_CHECK(
      tensor.defined() && tensor.layout() == at::kStrided && !tensor.is_nested(), op, ": expected ",
      name, " to be a dense tensor");
  TORCH_CHECK(
      tensor.scalar_type() == type && tensor.device() == scores.device() &&
          tensor.sym_sizes() == scores.sym_sizes(),
      op, ": expected ", name, " to be ", type, scores.sym_sizes(), " on ", scores.device(),
      ", like scores, but got ", tensor.scalar_type(), tensor.sym_sizes(), " on ", tensor.device());
}

void check(const char* op, const Tensor& scores, const Tensor& mask) {
  const auto type = scores.scalar_type();
  check_like(op, "scores", scores, type, scores);
  TORCH_CHECK(
      type == at::kDouble || type == at::kFloat || type == at::kBFloat16 || type == at::kHalf, op,
      ": expected scores to be float64, float32, bfloat16 or float16, but got ", type);
  TORCH_CHECK(scores.dim() > 0, op, ": expected at least one dimension, but got a scalar");
  check_like(op, "mask", mask, at::kBool, scores);
}

} // namespace

void check(const Tensor& scores, const Tensor& mask) {
  check("my_ops::masked_softmax", scores, mask);
}

void check(const Tensor& grad, const Tensor& scores, const Tensor& mask) {
  const auto op = "my_ops::masked_softmax_backward";
  check(op, scores, mask);
  check_like(op, "grad", grad, scores.scalar_type(), scores);
}

Tensor masked_softmax_formula(const Tensor& scores, const Tensor& mask) {
  check(scores, mask);
  const auto dtype = scores.scalar_type();
  const auto others = mask.logical_not();
  constexpr auto infinity = std::numeric_limits<double>::infinity();
  const auto x = scores.to(at::toOpMathType(dtype)).masked_fill(others, -infinity);
  // The second time for a row in which no score counts: its softmax is nan.
  const auto result = x.softmax(-1).masked_fill(others, 0);
  // Contiguous, as Meta promises: ATen takes over the strides of scores.
  return result.to(dtype).contiguous();
}

Tensor masked_softmax_backward_formula(
    const Tensor& grad, const Tensor& scores, const Tensor& mask) {
  check(grad, scores, mask);
  const auto dtype = scores.scalar_type();
  const auto weights = masked_softmax_formula(scores.to(at::toOpMathType(dtype)), mask);
  const auto product = weights * grad;
  const auto d_scores = product - weights * product.sum(-1, /*keepdim=*/true);
  return d_scores.to(dtype).contiguous();
}

TORCH_LIBRARY(my_ops, m) {
  // flexible_layout: kernels take any strides, so torch.compile need not keep those of eager mode.
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag, at::Tag::flexible_layout};
  m.def("masked_softmax(Tensor scores, Tensor mask) -> Tensor", tags);
  m.def("masked_softmax_backward(Tensor grad, Tensor scores, Tensor mask) -> Tensor", tags);
}

// Shapes without data, for torch.compile.
TORCH_LIBRARY_IMPL(my_ops, Meta, m) {
  m.impl("masked_softmax", [](const Tensor& scores, const Tensor& mask) {
    check(scores, mask);
    return scores.new_empty_symint(scores.sym_sizes());
  });
  m.impl(
      "masked_softmax_backward", [](const Tensor& grad, const Tensor& scores, const Tensor& mask) {
        check(grad, scores, mask);
        return scores.new_empty_symint(scores.sym_sizes());
      });
}

// Any device without a kernel of its own.
TORCH_LIBRARY_IMPL(my_ops, CompositeExplicitAutograd, m) {
  m.impl("masked_softmax", masked_softmax_formula);
  m.impl("masked_softmax_backward", masked_softmax_backward_formula);
}

// vmap: ATen batches each operator of the formulas.
TORCH_LIBRARY_IMPL(my_ops, FuncTorchBatched, m) {
  m.impl("masked_softmax", masked_softmax_formula);
  m.impl("masked_softmax_backward", masked_softmax_backward_formula);
}

} // namespace my_ops
