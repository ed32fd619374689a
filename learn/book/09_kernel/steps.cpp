// The pointwise part of a step, from pre-activations to the new state, written three times.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <cmath>

#include "lltm_kernel.h"

namespace {

// What ForwardUnit computes, with the functions of the standard library.
struct StdUnit {
  float* gates;
  const float* old_cell;
  float* new_h;
  float* new_cell;
  int64_t size;

  void operator()(int64_t row, int64_t unit) const {
    auto k = row * size + unit;
    auto* p = gates + 3 * row * size + unit;
    auto i = 1 / (1 + std::exp(-p[0])), o = 1 / (1 + std::exp(-p[size]));
    auto g = p[2 * size] > 0 ? p[2 * size] : std::expm1(p[2 * size]);
    new_cell[k] = old_cell[k] + g * i;
    new_h[k] = std::tanh(new_cell[k]) * o;
    p[0] = i, p[size] = o, p[2 * size] = g;
  }
};

template <typename Unit, bool parallel>
void loop(at::Tensor& gates, const at::Tensor& old_cell, at::Tensor& h, at::Tensor& c) {
  auto batch = old_cell.size(0), size = old_cell.size(1);
  Unit f{
      gates.mutable_data_ptr<float>(), old_cell.const_data_ptr<float>(),
      h.mutable_data_ptr<float>(), c.mutable_data_ptr<float>(), size};
  auto rows = [=](int64_t begin, int64_t end) {
    for (auto row = begin; row < end; ++row) {
#pragma GCC ivdep
      for (int64_t unit = 0; unit < size; ++unit) {
        f(row, unit);
      }
    }
  };
  parallel ? at::parallel_for(0, batch, 1, rows) : rows(0, batch);
}

} // namespace

// This file is compiled with -fopenmp and without.
#ifdef _OPENMP
#define SUFFIX ""
#else
#define SUFFIX "_without_fopenmp"
#endif

TORCH_LIBRARY_FRAGMENT(steps, m) {
  auto define = [&](const std::string& name, auto* kernel) {
    auto schema = name + SUFFIX "(Tensor(a!) gates, Tensor cell, Tensor(b!) h, Tensor(c!) c) -> ()";
    m.def(schema.c_str(), kernel);
  };
  define("plain", loop<StdUnit, false>);
  define("vectorized", loop<lltm::ForwardUnit<float>, false>);
  define("parallel", loop<lltm::ForwardUnit<float>, true>);
}
