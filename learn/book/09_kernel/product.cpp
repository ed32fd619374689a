// C = A @ B in float32, written twice.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>

namespace {

struct Product {
  int64_t K;
  const float* A;
  int64_t lda;
  const float* B;
  int64_t ldb;
  float* C;
  int64_t ldc;
};

// For rows and columns from the first to the end. Each row of B is added to a row of C.
void loops(const Product& p, int64_t row, int64_t end_row, int64_t column, int64_t end_column) {
  for (auto i = row; i < end_row; ++i) {
    auto* c = p.C + i * p.ldc;
    std::fill(c + column, c + end_column, 0.0f);
    for (int64_t k = 0; k < p.K; ++k) {
      for (auto j = column; j < end_column; ++j) {
        c[j] += p.A[i * p.lda + k] * p.B[k * p.ldb + j];
      }
    }
  }
}

typedef float vector_t __attribute__((vector_size(32))); // 8 floats
constexpr int64_t kRows = 4, kVectors = 3, kColumns = kVectors * 8;

// For kRows rows and kColumns columns. Their sums stay in registers.
void tile(const Product& p, int64_t row, int64_t column) {
  vector_t sums[kRows][kVectors] = {};
  for (int64_t k = 0; k < p.K; ++k) {
    for (int64_t j = 0; j < kVectors; ++j) {
      vector_t b;
      std::memcpy(&b, p.B + k * p.ldb + column + j * 8, sizeof(b));
      for (int64_t i = 0; i < kRows; ++i) {
        sums[i][j] += p.A[(row + i) * p.lda + k] * b;
      }
    }
  }
  for (int64_t i = 0; i < kRows; ++i) {
    std::memcpy(p.C + (row + i) * p.ldc + column, sums[i], sizeof(sums[i]));
  }
}

Product pointers(const at::Tensor& A, const at::Tensor& B, at::Tensor& C) {
  return {A.size(1), A.const_data_ptr<float>(),   A.size(1), B.const_data_ptr<float>(),
          B.size(1), C.mutable_data_ptr<float>(), B.size(1)};
}

void by_loops(const at::Tensor& A, const at::Tensor& B, at::Tensor& C) {
  loops(pointers(A, B, C), 0, A.size(0), 0, B.size(1));
}

void by_tiles(const at::Tensor& A, const at::Tensor& B, at::Tensor& C) {
  auto p = pointers(A, B, C);
  auto M = A.size(0), N = B.size(1);
  auto whole_rows = M / kRows * kRows, whole_columns = N / kColumns * kColumns;
  // All rows pass over the same columns of B before the next, while these lie in the cache.
  for (int64_t column = 0; column < whole_columns; column += kColumns) {
    for (int64_t row = 0; row < whole_rows; row += kRows) {
      tile(p, row, column);
    }
  }
  loops(p, 0, whole_rows, whole_columns, N);
  loops(p, whole_rows, M, 0, N);
}

} // namespace

// All are contiguous.
TORCH_LIBRARY_FRAGMENT(product, m) {
  m.def("loops(Tensor A, Tensor B, Tensor(a!) C) -> ()", by_loops);
  m.def("tiles(Tensor A, Tensor B, Tensor(a!) C) -> ()", by_tiles);
}
