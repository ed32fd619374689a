// What the machine can do, for the benchmark: to be called by a timer.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/CPUBlas.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

namespace {

// An operator that does nothing, with the cell's arguments and results.
std::tuple<at::Tensor, at::Tensor> empty_call(
    const at::Tensor& /*input*/,
    const at::Tensor& /*weights*/,
    const at::Tensor& /*bias*/,
    const at::Tensor& old_h,
    const at::Tensor& old_cell) {
  return {at::empty_like(old_h), at::empty_like(old_cell)};
}

template <typename scalar_t>
void products(int64_t M, int64_t N, int64_t K, int64_t repeats) {
  const auto dtype = c10::CppTypeToScalarType<scalar_t>::value;
  constexpr bool pairs = sizeof(scalar_t) == 2;
  const at::Tensor A = at::zeros({M, K}, dtype);
  const at::Tensor B = at::zeros({K, N}, dtype);
  const at::Tensor C = at::empty({M, N}, at::kFloat);
  for (int64_t i = 0; i < repeats; ++i) {
    at::native::cpublas::brgemm(
        M,
        N,
        K,
        K,
        N,
        N,
        false,
        A.const_data_ptr<scalar_t>(),
        B.const_data_ptr<scalar_t>(),
        C.mutable_data_ptr<float>(),
        pairs);
  }
  if (pairs) {
    at::native::cpublas::brgemm_release();
  }
}

// Each thread makes so many products of one block, in cache.
void brgemm(
    at::ScalarType dtype,
    int64_t M,
    int64_t N,
    int64_t K,
    int64_t repeats) {
  at::parallel_for(0, at::get_num_threads(), 1, [&](int64_t, int64_t) {
    if (dtype == at::kBFloat16) {
      products<at::BFloat16>(M, N, K, repeats);
    } else {
      products<float>(M, N, K, repeats);
    }
  });
}

// Reads data as many times, split between the threads.
double read_all(const at::Tensor& data, int64_t repeats) {
  const auto threads = at::get_num_threads();
  const auto share = data.numel() / threads / 64 * 64;
  const auto sums = at::zeros({threads * 16}, at::kFloat);
  at::parallel_for(0, threads, 1, [&](int64_t thread, int64_t) {
    typedef float vector_t __attribute__((vector_size(64)));
    const auto* from = data.const_data_ptr<float>() + thread * share;
    vector_t lanes[4] = {};
    for (int64_t repeat = 0; repeat < repeats; ++repeat) {
      for (int64_t i = 0; i < share; i += 64) {
        for (int64_t j = 0; j < 4; ++j) {
          vector_t value;
          __builtin_memcpy(&value, from + i + 16 * j, sizeof(value));
          lanes[j] += value;
        }
      }
    }
    lanes[0] += lanes[1] + lanes[2] + lanes[3];
    sums.mutable_data_ptr<float>()[thread * 16] = lanes[0][0];
  });
  return sums.const_data_ptr<float>()[0];
}

} // namespace

TORCH_LIBRARY_FRAGMENT(lltm_benchmark, m) {
  m.def(
      "empty_call(Tensor input, Tensor weights, Tensor bias, Tensor old_h,"
      " Tensor old_cell) -> (Tensor, Tensor)",
      empty_call);
  m.def(
      "brgemm(ScalarType dtype, int M, int N, int K, int repeats) -> ()",
      brgemm);
  m.def("read(Tensor data, int repeats) -> float", read_all);
}
