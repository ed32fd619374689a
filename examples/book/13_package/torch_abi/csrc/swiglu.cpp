#include "swiglu.h"

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/sigmoid.h>
#include <torch/library.h>

namespace my_ops {
namespace {
void check_alike(
    const char* op, std::initializer_list<std::pair<const char*, const Tensor&>> arguments) {
  const auto& [first_name, first] = *arguments.begin();
  for (const auto& [name, tensor] : arguments) {
    TORCH_CHECK(
        tensor.defined() && tensor.layout() == at::kStrided && !tensor.is_nested(), op,
        ": expected ", name, " to be a dense tensor");
    const auto type = first.scalar_type();
    TORCH_CHECK(
        type == at::kDouble || type == at::kFloat || type == at::kBFloat16 || type == at::kHalf, op,
        ": expected Double, Float, BFloat16 or Half, but got ", type);
    TORCH_CHECK(
        tensor.scalar_type() == type && tensor.device() == first.device() &&
            tensor.sym_sizes() == first.sym_sizes(),
        op, ": expected ", name, " to be like ", first_name, ", ", type, first.sym_sizes(), " on ",
        first.device(), ", but got ", tensor.scalar_type(), tensor.sym_sizes(), " on ",
        tensor.device());
  }
}

} // namespace

void check(const Tensor& gate, const Tensor& value) {
  check_alike("my_ops::swiglu", {{"gate", gate}, {"value", value}});
}

void check(const Tensor& grad, const Tensor& gate, const Tensor& value) {
  check_alike("my_ops::swiglu_backward", {{"gate", gate}, {"value", value}, {"grad", grad}});
}

Tensor swiglu_formula(const Tensor& gate, const Tensor& value) {
  check(gate, value);
  const auto dtype = gate.scalar_type();
  const auto x = gate.to(at::toOpMathType(dtype));
  // Contiguous, as Meta promises: ATen takes over the strides of gate.
  return (x * at::sigmoid(x) * value).to(dtype).contiguous();
}

Gradients swiglu_backward_formula(const Tensor& grad, const Tensor& gate, const Tensor& value) {
  check(grad, gate, value);
  const auto dtype = gate.scalar_type();
  const auto x = gate.to(at::toOpMathType(dtype));
  const auto s = at::sigmoid(x);
  const auto d_gate = s * (1 + x * (1 - s)) * value * grad;
  return {d_gate.to(dtype).contiguous(), (x * s * grad).to(dtype).contiguous()};
}

TORCH_LIBRARY(my_ops, m) {
  // flexible_layout: kernels take any strides, so torch.compile need not keep those of eager mode.
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag, at::Tag::flexible_layout};
  m.def("swiglu(Tensor gate, Tensor value) -> Tensor", tags);
  m.def("swiglu_backward(Tensor grad, Tensor gate, Tensor value) -> (Tensor, Tensor)", tags);
}

// Shapes without data, for torch.compile.
TORCH_LIBRARY_IMPL(my_ops, Meta, m) {
  m.impl("swiglu", [](const Tensor& gate, const Tensor& value) {
    check(gate, value);
    return gate.new_empty_symint(gate.sym_sizes());
  });
  m.impl("swiglu_backward", [](const Tensor& grad, const Tensor& gate, const Tensor& value) {
    check(grad, gate, value);
    const auto sizes = gate.sym_sizes();
    return Gradients{gate.new_empty_symint(sizes), gate.new_empty_symint(sizes)};
  });
}

// Any device without a kernel of its own.
TORCH_LIBRARY_IMPL(my_ops, CompositeExplicitAutograd, m) {
  m.impl("swiglu", swiglu_formula);
  m.impl("swiglu_backward", swiglu_backward_formula);
}

// vmap: ATen batches each operator of the formulas.
TORCH_LIBRARY_IMPL(my_ops, FuncTorchBatched, m) {
  m.impl("swiglu", swiglu_formula);
  m.impl("swiglu_backward", swiglu_backward_formula);
}

} // namespace my_ops
