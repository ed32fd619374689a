// threads DTYPE: drives the operators through every way in which threads divide
// their work, for ThreadSanitizer to watch. The fuzzer compares the numbers.

#include "ops/lltm.h"
#include "ops/lltm_sequence.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <map>
#include <string>
#include <thread>
#include <vector>

namespace {

using at::Tensor;

struct Arguments {
  Tensor input;
  Tensor weights;
  Tensor bias;
  Tensor h;
  Tensor cell;
  lltm::OptionalTensor batch_sizes;
  bool reverse = false;
  lltm::OptionalTensor resets;
};

Arguments arguments(
    at::ScalarType dtype,
    at::IntArrayRef lead,
    int64_t batch,
    int64_t input_features,
    int64_t state_size) {
  const auto features = state_size + input_features;
  const auto normal = [&](at::IntArrayRef sizes, double scale = 1) {
    return (at::randn(sizes, at::kDouble) * scale).to(dtype).requires_grad_();
  };
  auto sizes = lead.vec();
  sizes.push_back(input_features);
  return {
      normal(sizes),
      normal({3 * state_size, features}, 1 / std::sqrt(features)),
      normal({3 * state_size}),
      normal({batch, state_size}),
      normal({batch, state_size})};
}

struct Sequence {
  int64_t time;
  int64_t batch;
  int64_t input_features;
  int64_t state_size;
};

struct Kind {
  bool packed;
  bool reverse;
  bool resets;
};

Arguments arguments(at::ScalarType dtype, const Sequence& s, const Kind& kind) {
  std::vector<int64_t> lead{s.time, s.batch};
  lltm::OptionalTensor batch_sizes;
  if (kind.packed) {
    batch_sizes = at::linspace(s.batch, 1, s.time).to(at::kLong);
    lead = {batch_sizes->sum().item<int64_t>()};
  }
  auto a = arguments(dtype, lead, s.batch, s.input_features, s.state_size);
  a.batch_sizes = batch_sizes;
  a.reverse = kind.reverse;
  if (kind.resets) {
    a.resets = at::rand(lead) < 0.2;
  }
  return a;
}

using Operator = lltm::ForwardResult (*)(const Arguments&);

lltm::ForwardResult step(const Arguments& a) {
  return lltm::forward({a.input, a.weights, a.bias, a.h, a.cell});
}

lltm::ForwardResult sequence(const Arguments& a) {
  return lltm::sequence_forward(
      {a.input,
       a.weights,
       a.bias,
       a.h,
       a.cell,
       a.batch_sizes,
       a.reverse,
       a.resets});
}

// Inference and training.
void run(Operator op, const Arguments& a) {
  {
    const at::NoGradGuard no_grad;
    op(a);
  }
  const auto [h, cell] = op(a);
  torch::autograd::grad(
      {h.sum() + cell.sum()}, {a.input, a.weights, a.bias, a.h, a.cell});
}

void run_on_threads(Operator op, const Arguments& a) {
  for (const int threads : {2, 4}) {
    at::set_num_threads(threads);
    run(op, a);
  }
}

void run_steps(at::ScalarType dtype) {
  constexpr int64_t kShapes[][3] = {
      {1, 64, 600},
      {3, 64, 300},
      {16, 30, 200},
      {70, 334, 202},
      {300, 8, 64},
  };
  for (const auto& [batch, input_features, state_size] : kShapes) {
    run_on_threads(
        step, arguments(dtype, {batch}, batch, input_features, state_size));
  }
}

void run_sequences(at::ScalarType dtype) {
  constexpr Sequence kShapes[] = {
      {5, 9, 20, 150}, // as a loop over the cell
      {40, 1, 8, 270}, // threads divide the units
      {8, 1, 4, 1100}, // and read weights as they lie
      {12, 2, 16, 300},
      {16, 6, 33, 200},
      {20, 40, 8, 70},  // the rows
      {12, 17, 6, 100}, // rows and units
      {600, 2, 4, 130}, // in chunks
  };
  for (const auto& s : kShapes) {
    for (const bool packed : {false, true}) {
      for (const bool reverse : {false, true}) {
        for (const bool resets : {false, true}) {
          run_on_threads(
              sequence, arguments(dtype, s, {packed, reverse, resets}));
        }
      }
    }
  }
}

// Programs that serve many requests share the weights.
void run_callers_at_the_same_time(at::ScalarType dtype) {
  at::set_num_threads(2);
  const auto a = arguments(dtype, Sequence{12, 6, 16, 100}, Kind{});
  std::vector<std::thread> callers;
  for (int i = 0; i < 3; ++i) {
    callers.emplace_back([&] {
      at::set_num_threads(2);
      run(sequence, a);
    });
  }
  for (auto& caller : callers) {
    caller.join();
  }
}

} // namespace

int main(int argc, char** argv) {
  TORCH_CHECK(argc == 2, "expected a dtype");
  const std::map<std::string, at::ScalarType> dtypes{
      {"float64", at::kDouble},
      {"float32", at::kFloat},
      {"bfloat16", at::kBFloat16},
      {"float16", at::kHalf},
  };
  const auto dtype = dtypes.at(argv[1]);
  at::manual_seed(0);
  run_steps(dtype);
  run_sequences(dtype);
  run_callers_at_the_same_time(dtype);
  return 0;
}
