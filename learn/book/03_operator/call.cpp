// A program without Python calls the operator. All it knows of the library is
// the name and the types of the schema.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <iostream>

using Tensors = std::tuple<at::Tensor, at::Tensor>;

int main() {
  auto forward = c10::Dispatcher::singleton()
                     .findSchemaOrThrow("lltm::forward", "")
                     .typed<Tensors(
                         const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                         const at::Tensor&)>();
  auto ones = at::ones({1, 1});
  auto [new_h, new_cell] = forward.call(ones, at::ones({3, 2}), at::ones(3), ones, ones);
  std::cout << new_h.item<float>() << ' ' << new_cell.item<float>() << '\n';
}
