#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

namespace lltm {

// new_h, new_cell
using State = std::tuple<at::Tensor, at::Tensor>;
// new_h, new_cell, and the gates [batch, 3 * state_size] after their functions
using StateAndGates = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
// d_input, d_weights, d_bias, d_old_h, d_old_cell
using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// Every kernel of the forward operators calls this first.
void check_forward(
    const at::Tensor& input, const at::Tensor& weights, const at::Tensor& bias,
    const at::Tensor& old_h, const at::Tensor& old_cell);

// And every kernel of backward this.
void check_backward(
    const at::Tensor& grad_h, const at::Tensor& grad_cell, const at::Tensor& new_cell,
    const at::Tensor& gates, const at::Tensor& input, const at::Tensor& weights,
    const at::Tensor& old_h);

// Every kernel calls this, too. It prints its arguments if LLTM_LOG_CALLS is set.
void log_call(const char* dispatch_key, const char* operator_name);

} // namespace lltm
