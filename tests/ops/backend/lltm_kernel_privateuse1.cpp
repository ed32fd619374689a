// The cell for a backend of the tests' own, by the steps of
// CONTRIBUTING.md, "Add a backend": of the dispatch key PrivateUse1, on memory
// of the host.

#include "ops/checks.h"
#include "ops/dispatch.h"
#include "ops/gate_math.h"
#include "ops/lltm.h"
#include "ops/lltm_composite.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

namespace lltm {

namespace {

// gates holds the products with bias, and afterwards the gates.
template <typename scalar_t>
void forward_units(
    const ForwardArguments& a,
    const at::Tensor& gates,
    const at::Tensor& new_h,
    const at::Tensor& new_cell) {
  const CellMath<at::opmath_type<scalar_t>> math(a);
  auto g = gates.accessor<scalar_t, 2>();
  const auto state_size = new_h.size(1);
  for (int64_t row = 0; row < new_h.size(0); ++row) {
    for (int64_t unit = 0; unit < state_size; ++unit) {
      auto& i = g[row][unit];
      auto& o = g[row][state_size + unit];
      auto& candidate = g[row][2 * state_size + unit];
      const auto out = math.forward(
          i, o, candidate, a.old_cell.accessor<scalar_t, 2>()[row][unit]);
      i = out.input_gate;
      o = out.output_gate;
      candidate = out.candidate;
      new_h.accessor<scalar_t, 2>()[row][unit] = out.new_h;
      new_cell.accessor<scalar_t, 2>()[row][unit] = out.new_cell;
    }
  }
}

template <typename scalar_t>
scalar_t grad_or_zero(const OptionalTensor& grad, int64_t row, int64_t unit) {
  return grad ? grad->accessor<scalar_t, 2>()[row][unit] : scalar_t(0);
}

template <typename scalar_t>
void backward_units(
    const BackwardArguments& a,
    const at::Tensor& d_preactivations,
    const at::Tensor& d_old_cell) {
  using opmath_t = at::opmath_type<scalar_t>;
  const CellMath<opmath_t> math(a);
  const auto g = a.gates.accessor<scalar_t, 2>();
  auto d = d_preactivations.accessor<scalar_t, 2>();
  const auto state_size = d_old_cell.size(1);
  for (int64_t row = 0; row < d_old_cell.size(0); ++row) {
    for (int64_t unit = 0; unit < state_size; ++unit) {
      const auto out = math.backward(
          grad_or_zero<scalar_t>(a.grad_h, row, unit),
          grad_or_zero<scalar_t>(a.grad_cell, row, unit),
          lltm::tanh(opmath_t(a.new_cell.accessor<scalar_t, 2>()[row][unit])),
          g[row][unit],
          g[row][state_size + unit],
          g[row][2 * state_size + unit]);
      d[row][unit] = out.d_pre_i;
      d[row][state_size + unit] = out.d_pre_o;
      d[row][2 * state_size + unit] = out.d_pre_g;
      d_old_cell.accessor<scalar_t, 2>()[row][unit] = out.d_old_cell;
    }
  }
}

ForwardWithGatesResult forward_with_gates_kernel(const ForwardArguments& a) {
  check_arguments(a);
  auto gates = pre_activations(a.input, a.weights, a.bias, a.old_h);
  auto new_h = at::empty(a.old_h.sizes(), a.input.options());
  auto new_cell = at::empty(a.old_h.sizes(), a.input.options());
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, a.input.scalar_type(), "lltm_forward", [&] {
        forward_units<scalar_t>(a, gates, new_h, new_cell);
      });
  return {std::move(new_h), std::move(new_cell), std::move(gates)};
}

BackwardResult backward_kernel(const BackwardArguments& a) {
  check_arguments(a);
  const auto d_preactivations = at::empty(a.gates.sizes(), a.input.options());
  const auto d_old_cell = at::empty(a.new_cell.sizes(), a.input.options());
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, a.input.scalar_type(), "lltm_backward", [&] {
        backward_units<scalar_t>(a, d_preactivations, d_old_cell);
      });
  return pre_activations_backward(
      d_preactivations, d_old_cell, a.input, a.weights, a.old_h, a.output_mask);
}

} // namespace

TORCH_LIBRARY_IMPL(lltm, PrivateUse1, m) {
  m.impl("forward", as_kernel<without_gates<forward_with_gates_kernel>>());
  m.impl("_forward_with_gates", as_kernel<forward_with_gates_kernel>());
  m.impl("backward", as_kernel<backward_kernel>());
}

} // namespace lltm
