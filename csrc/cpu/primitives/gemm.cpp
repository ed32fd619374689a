#include "cpu/primitives/gemm.h"

#include <ATen/Context.h>

#include <sys/mman.h>
#include <unistd.h>

#include <array>

namespace lltm {

namespace {

// Makes a page executable after it was written, as oneDNN's generator does.
bool try_generated_code() {
  const auto size = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  void* const page = mmap(
      nullptr,
      size,
      PROT_READ | PROT_WRITE,
      MAP_PRIVATE | MAP_ANONYMOUS,
      -1,
      0);
  if (page == MAP_FAILED) {
    return false;
  }
  const bool allowed = mprotect(page, size, PROT_READ | PROT_EXEC) == 0;
  munmap(page, size);
  return allowed;
}

bool try_bfloat16_gemm() {
#if defined(__x86_64__) && defined(__GNUC__)
  // oneDNN would emulate missing instructions, more slowly than float.
  if (!__builtin_cpu_supports("avx512bf16")) {
    return false;
  }
  // No function tells whether oneDNN supports bfloat16. A call raises where it
  // does not, as under ONEDNN_MAX_CPU_ISA.
  std::array<c10::BFloat16, kVector * 2> zeros{};
  std::array<float, kVector> result{};
  try {
    onednn_gemm<c10::BFloat16>(
        {.M = 1,
         .N = kVector,
         .K = 2,
         .A = {zeros.data(), 2},
         .B = {zeros.data(), kVector},
         .C = {result.data(), kVector},
         .accumulate = false},
        /*in_one_call=*/true);
    release_gemm<c10::BFloat16>();
    return true;
  } catch (const std::exception&) {
  }
#endif
  return false;
}

} // namespace

bool may_run_generated_code() {
  static const bool may = try_generated_code();
  return may;
}

bool has_bfloat16_gemm() {
  // torch.backends.mkldnn.flags(enabled=False) can come and go.
  if (!at::globalContext().userEnabledMkldnn() || !may_run_generated_code()) {
    return false;
  }
  static const bool supported = try_bfloat16_gemm();
  return supported;
}

} // namespace lltm
