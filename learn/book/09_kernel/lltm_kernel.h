#pragma once

#include <ATen/Dispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>

#include "lltm.h"
#include "units.h"

// What the kernels of all devices share. A device adds for_each_unit(batch, state_size, f), which
// calls f(row, unit) for each hidden unit.
namespace lltm {

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
