#include "../check.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/core/Dispatch_v2.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <type_traits>
#include <vector>

namespace my_ops {
namespace {
// Half types are computed in float, and rounded once.
template <typename scalar_t>
using opmath_t = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;

// A kernel must not read outside of its arguments. _segment_sum.py says the same of fake tensors.
void check(const char* op, const std::string& name, const Tensor& tensor, const Tensor& lengths) {
  check_type(op, name, tensor);
  if (tensor.dim() < 2) {
    refuse(op, name + " of at least two dimensions, but got " + std::to_string(tensor.dim()));
  }
  const auto sizes = tensor.sizes(), segments = lengths.sizes();
  if (lengths.scalar_type() != ScalarType::Long || lengths.device() != tensor.device() ||
      !std::equal(sizes.begin(), sizes.end() - 2, segments.begin(), segments.end() - 1)) {
    const auto expected = "lengths to be int64 and like " + name + ", without its last two sizes";
    refuse(op, expected + ", then segments, but got " + describe(lengths, lengths.scalar_type()));
  }
}

// The row at which each segment begins, and the end. What the lengths are is known here alone. Each
// example of a batch is checked: the sum of all hides that one has too many and another too few.
std::vector<int64_t> borders_of(const char* op, const Tensor& lengths, int64_t rows) {
  const auto contiguous = torch::stable::contiguous(lengths);
  const auto* length = contiguous.const_data_ptr<int64_t>();
  const auto sizes = lengths.sizes();
  const auto examples =
      std::accumulate(sizes.begin(), sizes.end() - 1, int64_t{1}, std::multiplies<int64_t>());
  std::vector<int64_t> borders{0};
  for (int64_t example = 0; example < examples; ++example) {
    for (int64_t s = 0; s < sizes.back(); ++s, ++length) {
      if (*length < 0 || *length > rows) {
        const auto most = std::to_string(rows);
        refuse(op, "lengths from 0 to " + most + ", but got " + std::to_string(*length));
      }
      borders.push_back(borders.back() + *length);
    }
    const auto sum = borders.back() - example * rows;
    if (sum != rows) {
      const auto got = std::to_string(sum);
      refuse(op, "lengths with a sum of " + std::to_string(rows) + ", but got " + got);
    }
  }
  return borders;
}

// Calls body(begin, end, s) for the rows of each segment s.
template <typename F>
void for_each_segment(const std::vector<int64_t>& borders, int64_t columns, const F& body) {
  const auto segments = static_cast<int64_t>(borders.size()) - 1;
  // In elements, 8192: for less, another thread takes longer to start.
  const auto grain_size = 8192 * segments / (borders.back() * columns + 1) + 1;
  torch::stable::parallel_for(0, segments, grain_size, [&](int64_t first, int64_t last) {
    for (auto s = first; s < last; ++s) {
      body(borders[s], borders[s + 1], s);
    }
  });
}

Tensor segment_sum_forward_kernel(const Tensor& values, const Tensor& lengths, double decay) {
  const auto op = "my_ops::segment_sum_forward";
  check(op, "values", values, lengths);
  const auto columns = values.size(-1);
  const auto borders = borders_of(op, lengths, values.size(-2));
  std::vector<int64_t> sizes(lengths.sizes().begin(), lengths.sizes().end());
  sizes.push_back(columns);
  auto result = torch::stable::new_empty(values, sizes);
  const auto values_ = torch::stable::contiguous(values); // a copy of what is not
  THO_DISPATCH_V2(
      values.scalar_type(), "segment_sum_forward", AT_WRAP([&] {
        const auto x = values_.const_data_ptr<scalar_t>();
        const auto y = result.mutable_data_ptr<scalar_t>();
        for_each_segment(borders, columns, [&](int64_t begin, int64_t end, int64_t s) {
          std::vector<opmath_t<scalar_t>> sums(columns);
          for (auto row = begin; row < end; ++row) {
            for (int64_t k = 0; k < columns; ++k) {
              sums[k] = sums[k] * decay + x[row * columns + k];
            }
          }
          std::copy(sums.begin(), sums.end(), y + s * columns);
        });
      }),
      AT_FLOATING_TYPES, ScalarType::Half, ScalarType::BFloat16);
  return result;
}

Tensor segment_sum_backward_kernel(
    const Tensor& grad, const Tensor& lengths, double decay, int64_t rows) {
  const auto op = "my_ops::segment_sum_backward";
  check(op, "grad", grad, lengths);
  if (grad.size(-2) != lengths.size(-1)) {
    refuse(op, "grad to have a row for each segment, but got " + std::to_string(grad.size(-2)));
  }
  const auto columns = grad.size(-1);
  const auto borders = borders_of(op, lengths, rows);
  std::vector<int64_t> sizes(grad.sizes().begin(), grad.sizes().end());
  sizes[sizes.size() - 2] = rows;
  auto d_values = torch::stable::new_empty(grad, sizes);
  const auto grad_ = torch::stable::contiguous(grad);
  THO_DISPATCH_V2(
      grad.scalar_type(), "segment_sum_backward", AT_WRAP([&] {
        const auto g = grad_.const_data_ptr<scalar_t>();
        const auto d = d_values.mutable_data_ptr<scalar_t>();
        for_each_segment(borders, columns, [&](int64_t begin, int64_t end, int64_t s) {
          opmath_t<scalar_t> weight = 1;
          for (auto row = end - 1; row >= begin; --row) {
            for (int64_t k = 0; k < columns; ++k) {
              d[row * columns + k] = weight * g[s * columns + k];
            }
            weight *= decay;
          }
        });
      }),
      AT_FLOATING_TYPES, ScalarType::Half, ScalarType::BFloat16);
  return d_values;
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(my_ops, CPU, m) {
  m.impl("segment_sum_forward", TORCH_BOX(&segment_sum_forward_kernel));
  m.impl("segment_sum_backward", TORCH_BOX(&segment_sum_backward_kernel));
}

} // namespace my_ops
