// Stands before ATen's header of this name in a build with sanitizers. oneDNN
// generates its products at run time, so no sanitizer sees what they read and
// write: it is told before each.

#pragma once

#include_next <ATen/native/CPUBlas.h>

// gcc knows both pairs by these signatures.
#if defined(__SANITIZE_ADDRESS__)
#define LLTM_TELL_READ __asan_loadN
#define LLTM_TELL_WRITE __asan_storeN
#else
#define LLTM_TELL_READ __tsan_read_range
#define LLTM_TELL_WRITE __tsan_write_range
#endif
extern "C" void LLTM_TELL_READ(void* from, long bytes);
extern "C" void LLTM_TELL_WRITE(void* to, long bytes);

namespace at::native::cpublas {

template <typename T>
void told_brgemm(
    int64_t M,
    int64_t N,
    int64_t K,
    int64_t ld_a,
    int64_t ld_b,
    int64_t ld_c,
    bool add_C,
    const T* A,
    const T* B,
    float* C,
    bool is_vnni) {
  const int64_t pair = is_vnni ? 2 : 1;
  for (int64_t row = 0; row < M; ++row) {
    LLTM_TELL_READ(const_cast<T*>(A) + row * ld_a, K * sizeof(T));
    LLTM_TELL_WRITE(C + row * ld_c, N * sizeof(float));
  }
  for (int64_t row = 0; row < K / pair; ++row) {
    LLTM_TELL_READ(const_cast<T*>(B) + row * pair * ld_b, N * pair * sizeof(T));
  }
  brgemm(M, N, K, ld_a, ld_b, ld_c, add_C, A, B, C, is_vnni);
}

} // namespace at::native::cpublas

#define brgemm told_brgemm
