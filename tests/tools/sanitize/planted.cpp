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
constexpr int64_t kFeatures = kState + 4;

const auto zeros = [](at::IntArrayRef sizes) { return at::zeros(sizes); };

Tensor view(float* data, at::IntArrayRef sizes) {
  return at::from_blob(data, sizes);
}

void step(float* weights, float* bias) {
  const auto h = zeros({kBatch, kState});
  lltm::forward(
      {zeros({kBatch, kFeatures - kState}),
       view(weights, {3 * kState, kFeatures}),
       view(bias, {3 * kState}),
       h,
       h});
}

void short_bias() {
  std::vector<float> weights(3 * kState * kFeatures);
  std::vector<float> bias(3 * kState - 1);
  step(weights.data(), bias.data());
}

void misaligned_weights() {
  std::vector<char> bytes((3 * kState * kFeatures + 1) * sizeof(float));
  std::vector<float> bias(3 * kState);
  step(reinterpret_cast<float*>(bytes.data() + 1), bias.data());
}

// Written while the library reads them.
void written_bias() {
  std::vector<float> weights(3 * kState * kFeatures);
  std::vector<float> bias(3 * kState);
  std::thread writer([&] { bias[5] = 1; });
  step(weights.data(), bias.data());
  writer.join();
}

} // namespace

int main(int argc, char** argv) {
  const std::map<std::string, void (*)()> faults{
      {"short_bias", short_bias},
      {"misaligned_weights", misaligned_weights},
      {"written_bias", written_bias},
  };
  TORCH_CHECK(argc == 2, "expected the name of a fault");
  faults.at(argv[1])();
  return 0;
}
