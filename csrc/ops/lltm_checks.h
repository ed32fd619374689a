#pragma once

#include <ATen/core/Tensor.h>

// The argument checks, called by every kernel that computes or infers a shape.
// They name the public operator also where its internal twin was called.
namespace lltm {

// All arguments defined and on one device. Stands apart because FakeTensor
// hides the devices from the Meta kernel: the Autograd kernels, above it, call
// this.
void check_forward_devices(
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& bias,
    const at::Tensor& old_h,
    const at::Tensor& old_cell);

// Devices, layouts, dtypes and shapes.
void check_forward(
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& bias,
    const at::Tensor& old_h,
    const at::Tensor& old_cell);

void check_backward_devices(
    const at::Tensor& grad_h,
    const at::Tensor& grad_cell,
    const at::Tensor& new_cell,
    const at::Tensor& gates,
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& old_h);

void check_backward(
    const at::Tensor& grad_h,
    const at::Tensor& grad_cell,
    const at::Tensor& new_cell,
    const at::Tensor& gates,
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& old_h);

} // namespace lltm
