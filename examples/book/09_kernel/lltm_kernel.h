#pragma once

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>

#include "gate_math.h"
#include "lltm.h"

// What the kernels of all devices share. A device adds for_each_unit(batch, state_size, f), which
// calls f(row, unit) for each hidden unit. Rows are contiguous here.
namespace lltm {

// Turns the pre-activations of a unit into its gates, and computes its new state.
template <typename scalar_t>
struct ForwardUnit {
  scalar_t* gates;
  const scalar_t* old_cell;
  scalar_t* new_h;
  scalar_t* new_cell;
  int64_t size;

  C10_ALWAYS_INLINE C10_HOST_DEVICE void operator()(int64_t row, int64_t unit) const {
    using opmath_t = at::opmath_type<scalar_t>;
    auto k = row * size + unit;
    auto* p = gates + 3 * row * size + unit;
    auto i = sigmoid<opmath_t>(p[0]);
    auto o = sigmoid<opmath_t>(p[size]);
    auto g = elu<opmath_t>(p[2 * size]);
    opmath_t cell = old_cell[k] + g * i;
    new_h[k] = tanh(cell) * o;
    new_cell[k] = cell;
    p[0] = i, p[size] = o, p[2 * size] = g;
  }
};

// Turns the gates of a unit into the gradients of its pre-activations.
template <typename scalar_t>
struct BackwardUnit {
  scalar_t* gates;
  const scalar_t* new_cell;
  const scalar_t* grad_h;
  const scalar_t* grad_cell;
  scalar_t* d_old_cell;
  int64_t size;

  C10_ALWAYS_INLINE C10_HOST_DEVICE void operator()(int64_t row, int64_t unit) const {
    using opmath_t = at::opmath_type<scalar_t>;
    auto k = row * size + unit;
    auto* p = gates + 3 * row * size + unit;
    opmath_t i = p[0], o = p[size], g = p[2 * size], d_h = grad_h[k];
    auto t = tanh<opmath_t>(new_cell[k]);
    auto d_cell = grad_cell[k] + d_h * o * (1 - t * t);
    d_old_cell[k] = d_cell;
    p[0] = d_cell * g * i * (1 - i);
    p[size] = d_h * t * o * (1 - o);
    p[2 * size] = d_cell * i * (g > 0 ? opmath_t(1) : g + 1);
  }
};

template <typename ForEachUnit>
StateAndGates forward_with_gates_kernel(
    const ForEachUnit& for_each_unit, const at::Tensor& input, const at::Tensor& weights,
    const at::Tensor& bias, const at::Tensor& old_h, const at::Tensor& old_cell) {
  auto gates = at::linear(at::cat({old_h, input}, 1), weights, bias);
  auto cell = old_cell.contiguous();
  auto new_h = at::empty_like(cell), new_cell = at::empty_like(cell);
  auto batch = old_h.size(0), size = old_h.size(1);
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kBFloat16, at::kHalf, input.scalar_type(), "lltm_forward", [&] {
        ForwardUnit<scalar_t> unit{
            gates.mutable_data_ptr<scalar_t>(), cell.const_data_ptr<scalar_t>(),
            new_h.mutable_data_ptr<scalar_t>(), new_cell.mutable_data_ptr<scalar_t>(), size};
        for_each_unit(batch, size, unit);
      });
  return {new_h, new_cell, gates};
}

template <typename ForEachUnit>
Gradients backward_kernel(
    const ForEachUnit& for_each_unit, const at::Tensor& grad_h, const at::Tensor& grad_cell,
    const at::Tensor& new_cell, const at::Tensor& gates, const at::Tensor& input,
    const at::Tensor& weights, const at::Tensor& old_h) {
  auto d_gates = gates.clone(at::MemoryFormat::Contiguous);
  auto h = grad_h.contiguous(), c = grad_cell.contiguous(), cell = new_cell.contiguous();
  auto d_old_cell = at::empty_like(cell);
  auto batch = old_h.size(0), size = old_h.size(1);
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kBFloat16, at::kHalf, input.scalar_type(), "lltm_backward", [&] {
        BackwardUnit<scalar_t> unit{
            d_gates.mutable_data_ptr<scalar_t>(),
            cell.const_data_ptr<scalar_t>(),
            h.const_data_ptr<scalar_t>(),
            c.const_data_ptr<scalar_t>(),
            d_old_cell.mutable_data_ptr<scalar_t>(),
            size};
        for_each_unit(batch, size, unit);
      });
  auto d_old_h = at::mm(d_gates, weights.narrow(1, 0, size));
  auto d_input = at::mm(d_gates, weights.narrow(1, size, input.size(1)));
  auto d_weights = at::mm(d_gates.t(), at::cat({old_h, input}, 1));
  return {d_input, d_weights, d_gates.sum(0), d_old_h, d_old_cell};
}

} // namespace lltm
