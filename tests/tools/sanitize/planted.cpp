// One fault, which its argument names: the sanitizers have to find it. A buffer
// that is too short, or misaligned, is handed to the library as a tensor, so
// what is found is found in the library's own code.

#include "cpu/primitives/barrier.h"
#include "ops/lltm.h"

#include <ATen/ATen.h>

#include <map>
#include <string>
#include <thread>
#include <vector>

namespace {

using at::Tensor;

constexpr int64_t kBatch = 40;
constexpr int64_t kState = 32;

const auto zeros = [](at::IntArrayRef sizes) { return at::zeros(sizes); };

Tensor view(float* data, at::IntArrayRef sizes) {
  return at::from_blob(data, sizes);
}

// A step whose bias and weights are the caller's.
void step(const Tensor& weights, const Tensor& bias) {
  const auto h = zeros({kBatch, kState});
  lltm::forward({zeros({kBatch, 4}), weights, bias, h, h});
}

void short_bias() {
  std::vector<float> bias(3 * kState - 1);
  step(zeros({3 * kState, kState + 4}), view(bias.data(), {3 * kState}));
}

// Read by the products of oneDNN alone.
void short_weights() {
  std::vector<float> weights(3 * kState * (kState + 4) - 1);
  step(view(weights.data(), {3 * kState, kState + 4}), zeros({3 * kState}));
}

void misaligned_grad_h() {
  std::vector<char> bytes((kBatch * kState + 1) * sizeof(float));
  auto* grad_h = reinterpret_cast<float*>(bytes.data() + 1);
  const auto h = zeros({kBatch, kState});
  lltm::backward(
      {view(grad_h, {kBatch, kState}),
       h,
       h,
       zeros({kBatch, 3 * kState}),
       zeros({kBatch, 4}),
       zeros({3 * kState, kState + 4}),
       h,
       {true, true, true, true, true}});
}

// Written while the library reads them.
void written_bias() {
  std::vector<float> bias(3 * kState);
  std::thread writer([&] { bias[5] = 1; });
  step(zeros({3 * kState, kState + 4}), view(bias.data(), {3 * kState}));
  writer.join();
}

void written_weights() {
  std::vector<float> weights(3 * kState * (kState + 4));
  std::thread writer([&] { weights[5] = 1; });
  step(view(weights.data(), {3 * kState, kState + 4}), zeros({3 * kState}));
  writer.join();
}

// A team whose threads read what others write, and do not wait.
void no_barrier() {
  at::set_num_threads(2);
  std::vector<int64_t> steps(2);
  lltm::run_together(2, [&](int64_t begin, int64_t end, lltm::Barrier&) {
    for (auto i = begin; i < end; ++i) {
      steps[i] = steps[1 - i] + 1;
    }
  });
}

} // namespace

int main(int argc, char** argv) {
  const std::map<std::string, void (*)()> faults{
      {"short_bias", short_bias},
      {"short_weights", short_weights},
      {"misaligned_grad_h", misaligned_grad_h},
      {"written_bias", written_bias},
      {"written_weights", written_weights},
      {"no_barrier", no_barrier},
  };
  TORCH_CHECK(argc == 2, "expected the name of a fault");
  faults.at(argv[1])();
  return 0;
}
