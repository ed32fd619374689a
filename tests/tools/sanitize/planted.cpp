// One fault, which its argument names, for each sanitizer to find. A buffer
// that is too short, or misaligned, is handed to the library as a tensor, so
// what is found is found in the library's own code.

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

void step(std::vector<float>& bias) {
  const auto h = zeros({kBatch, kState});
  const auto weights = zeros({3 * kState, kState + 4});
  lltm::forward(
      {zeros({kBatch, 4}), weights, view(bias.data(), {3 * kState}), h, h});
}

void short_bias() {
  std::vector<float> bias(3 * kState - 1);
  step(bias);
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
  step(bias);
  writer.join();
}

} // namespace

int main(int argc, char** argv) {
  const std::map<std::string, void (*)()> faults{
      {"short_bias", short_bias},
      {"misaligned_grad_h", misaligned_grad_h},
      {"written_bias", written_bias},
  };
  TORCH_CHECK(argc == 2, "expected the name of a fault");
  faults.at(argv[1])();
  return 0;
}
