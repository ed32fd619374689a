#include "cpu/primitives/product.h"

#include <ATen/Context.h>
#include <ATen/cpu/Utils.h>
#include <ATen/native/CPUBlas.h>

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>

// Products of pairs by oneDNN, which generates a kernel for each size of a call
// and keeps it, so there are few such sizes.
namespace lltm {

namespace {

constexpr auto kTermsOfACall = kTermsOfAChain<c10::BFloat16>;
// With so many terms or more, those beyond whole tiles of AMX are a product of
// their own: 512x256x300 takes 43 % less time on the Xeon. With fewer terms it
// takes longer.
constexpr int64_t kTermsWorthTwoProducts = 384;

bool cpu_has(const std::string& capability) {
  const auto all = at::cpu::get_cpu_capabilities();
  const auto found = all.find(capability);
  return found != all.end() && found->second.toBool();
}

// Terms that AMX multiplies at a time. On the Xeon products are fastest for
// whole tiles of AMX. For some other sizes, like 388 and 556, they are six
// times as slow.
int64_t terms_of_an_amx_tile() {
  static const bool has_amx = cpu_has("amx_bf16");
  return has_amx ? 32 : 2;
}

int64_t terms_of_a_call(int64_t left) {
  const auto terms = std::min(left, kTermsOfACall);
  const auto tile = terms_of_an_amx_tile();
  return terms >= kTermsWorthTwoProducts ? terms / tile * tile : terms;
}

int64_t rows_of_a_call(int64_t left) {
  return left < 16 ? left : std::min<int64_t>(128, left / 16 * 16);
}

} // namespace

template <>
void multiply(const Operands<c10::BFloat16>& p) {
  for (int64_t k = 0, terms = 0; k < p.K; k += terms) {
    terms = terms_of_a_call(p.K - k);
    for (int64_t row = 0, rows = 0; row < p.M; row += rows) {
      rows = rows_of_a_call(p.M - row);
      at::native::cpublas::brgemm(
          rows,
          p.N,
          terms,
          p.A.ld,
          p.B.ld,
          p.C.ld,
          p.accumulate || k > 0,
          p.A.row(row) + k,
          p.B.row(k),
          p.C.row(row),
          true);
    }
  }
}

void release_amx_tiles() {
  at::native::cpublas::brgemm_release();
}

int64_t padded_terms_of_pairs(int64_t K) {
  const auto tile = std::max<int64_t>(8, terms_of_an_amx_tile());
  return K < 16 ? round_up(K, 2) : round_up(K, K > kTermsOfACall ? 32 : tile);
}

namespace {

// Makes a page executable after it was written, as oneDNN's generator does. A
// hardened system refuses that, and PyTorch's brgemm would then call a kernel
// that was not made.
bool may_run_generated_code() {
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

bool try_product() {
  // oneDNN would emulate missing instructions, more slowly than float.
  if (!cpu_has("avx512_bf16") || !may_run_generated_code()) {
    return false;
  }
  // No function tells whether oneDNN supports bfloat16. A call raises where it
  // does not, as under ONEDNN_MAX_CPU_ISA.
  constexpr int64_t N = 16;
  std::array<c10::BFloat16, N * 2> zeros{};
  std::array<float, N> result{};
  try {
    const ProductGuard<c10::BFloat16> guard;
    multiply<c10::BFloat16>(
        {.M = 1,
         .N = N,
         .K = 2,
         .A = {zeros.data(), 2},
         .B = {zeros.data(), N},
         .C = {result.data(), N}});
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

} // namespace

bool has_bfloat16_product() {
  // torch.backends.mkldnn.flags(enabled=False) can come and go.
  if (!at::globalContext().userEnabledMkldnn()) {
    return false;
  }
  static const bool supported = try_product();
  return supported;
}

} // namespace lltm
