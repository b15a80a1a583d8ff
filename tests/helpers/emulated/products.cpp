// The product of MindSpore's oneDNN that the operators call, in the place of its library for an emulated processor:
// C = alpha op(A) op(B) + beta C for arrays in rows, summed in double precision.

#include <cstdint>
#include <vector>

extern "C" int dnnl_sgemm(char a_op, char b_op, int64_t m, int64_t n, int64_t k, float alpha, const float *a, int64_t lda,
                          const float *b, int64_t ldb, float beta, float *c, int64_t ldc) {
  const int64_t b_down = b_op == 'N' ? ldb : 1, b_right = b_op == 'N' ? 1 : ldb;
  for (int64_t i = 0; i < m; ++i, c += ldc) {
    std::vector<double> sums(n);
    for (int64_t l = 0; l < k; ++l) {
      const double own = a_op == 'N' ? a[i * lda + l] : a[l * lda + i];
      for (int64_t j = 0; j < n; ++j) sums[j] += own * b[l * b_down + j * b_right];
    }
    for (int64_t j = 0; j < n; ++j) c[j] = static_cast<float>(alpha * sums[j] + (beta == 0 ? 0.0 : beta * c[j]));
  }
  return 0;
}
