// threads DTYPE: drives the operators through every way in which threads divide
// their work, for ThreadSanitizer to watch, and compares with one thread.

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

// The results of inference and of training, and the gradients of a loss that is
// small enough for float16.
std::vector<Tensor> results(Operator op, const Arguments& a) {
  std::vector<Tensor> all;
  {
    const at::NoGradGuard no_grad;
    const auto [h, cell] = op(a);
    all = {h, cell};
  }
  const auto [h, cell] = op(a);
  all.push_back(h.detach());
  all.push_back(cell.detach());
  const auto loss = ((h * h).sum() + cell.sum()) / a.input.size(0);
  const auto gradients =
      torch::autograd::grad({loss}, {a.input, a.weights, a.bias, a.h, a.cell});
  all.insert(all.end(), gradients.begin(), gradients.end());
  return all;
}

// Rounding is all that may differ: of the half types, a last bit of each term.
bool close(const Tensor& actual, const Tensor& expected) {
  const auto dtype = expected.scalar_type();
  const auto tolerance = dtype == at::kDouble ? 1e-12
      : dtype == at::kFloat                   ? 1e-5
                                              : 1e-2;
  const auto difference = (actual - expected).to(at::kDouble).abs();
  const auto size = expected.to(at::kDouble).abs().max().clamp_min(1);
  return (difference <= tolerance * size).all().item<bool>();
}

void check_same(
    const std::vector<Tensor>& actual,
    const std::vector<Tensor>& expected,
    const std::string& what) {
  for (size_t i = 0; i < expected.size(); ++i) {
    TORCH_CHECK(
        close(actual[i], expected[i]),
        what,
        ": expected result ",
        i,
        " to be that of one thread");
  }
}

void test_several_threads_give_what_one_gives(
    Operator op,
    const Arguments& a,
    const std::string& what) {
  at::set_num_threads(1);
  const auto expected = results(op, a);
  for (const int threads : {2, 4}) {
    at::set_num_threads(threads);
    check_same(
        results(op, a),
        expected,
        what + " on " + std::to_string(threads) + " threads");
  }
}

void test_steps(at::ScalarType dtype) {
  constexpr int64_t kShapes[][3] = {
      {1, 64, 600},
      {3, 64, 300},
      {16, 30, 200},
      {70, 334, 202},
      {300, 8, 64},
  };
  for (const auto& [batch, input_features, state_size] : kShapes) {
    const auto a = arguments(dtype, {batch}, batch, input_features, state_size);
    test_several_threads_give_what_one_gives(
        step,
        a,
        c10::str("step ", batch, " x ", input_features, " x ", state_size));
  }
}

void test_sequences(at::ScalarType dtype) {
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
          const auto a = arguments(dtype, s, {packed, reverse, resets});
          test_several_threads_give_what_one_gives(
              sequence,
              a,
              c10::str(
                  "sequence ",
                  s.time,
                  " x ",
                  s.batch,
                  " x ",
                  s.input_features,
                  " x ",
                  s.state_size,
                  packed ? " packed" : "",
                  reverse ? " reverse" : "",
                  resets ? " resets" : ""));
        }
      }
    }
  }
}

// Programs that serve many requests share the weights.
void test_callers_at_the_same_time(at::ScalarType dtype) {
  at::set_num_threads(2);
  const auto a = arguments(dtype, Sequence{12, 6, 16, 100}, Kind{});
  const auto expected = results(sequence, a);
  std::vector<std::vector<Tensor>> actual(3);
  std::vector<std::thread> callers;
  for (auto& of_caller : actual) {
    callers.emplace_back([&] {
      at::set_num_threads(2);
      of_caller = results(sequence, a);
    });
  }
  for (auto& caller : callers) {
    caller.join();
  }
  for (const auto& of_caller : actual) {
    check_same(of_caller, expected, "several callers");
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
  test_steps(dtype);
  test_sequences(dtype);
  test_callers_at_the_same_time(dtype);
  return 0;
}
