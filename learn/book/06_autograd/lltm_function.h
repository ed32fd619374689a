#pragma once

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "lltm_call.h"
#include "lltm_formula.h"

namespace lltm {

struct Function : torch::autograd::Function<Function> {
  using Context = torch::autograd::AutogradContext;
  using Tensors = torch::autograd::variable_list;

  // Compiled autograd may trace backward.
  static constexpr bool is_traceable = true;

  static Tensors forward(
      Context* context, const at::Tensor& input, const at::Tensor& weights, const at::Tensor& bias,
      const at::Tensor& old_h, const at::Tensor& old_cell) {
    log_call("Autograd", "forward");
    // Below autograd: it records this Function, and nothing that the kernel calls.
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [new_h, new_cell, gates] = forward_with_gates(input, weights, bias, old_h, old_cell);
    context->save_for_backward({input, weights, bias, old_h, old_cell, new_cell, gates});
    return {new_h, new_cell};
  }

  static Tensors backward(Context* context, const Tensors& grads) {
    log_call("Autograd", "backward");
    auto saved = context->get_saved_variables();
    auto input = saved[0], weights = saved[1], old_h = saved[3];
    if (!at::GradMode::is_enabled()) {
      auto [d_input, d_weights, d_bias, d_old_h, d_old_cell] =
          lltm::backward(grads[0], grads[1], saved[5], saved[6], input, weights, old_h);
      return {d_input, d_weights, d_bias, d_old_h, d_old_cell};
    }
    // Somebody will differentiate this gradient. To autograd the saved gates are constants, so a
    // gradient computed from them would lose what depends on them.
    auto [new_h, new_cell] = formula(input, weights, saved[2], old_h, saved[4]);
    Tensors needed, gradients(5);
    std::copy_if(saved.begin(), saved.begin() + 5, std::back_inserter(needed), [](auto& tensor) {
      return tensor.requires_grad();
    });
    auto computed = torch::autograd::grad(
        {new_h, new_cell}, needed, {grads[0], grads[1]},
        /*retain_graph=*/true,
        /*create_graph=*/true);
    for (size_t k = 0, next = 0; k < gradients.size(); ++k) {
      gradients[k] = saved[k].requires_grad() ? computed[next++] : at::Tensor();
    }
    return gradients;
  }
};

} // namespace lltm
