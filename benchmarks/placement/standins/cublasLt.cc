// cuBLASLt: one algorithm for every product.

extern "C" int cublasLtMatmulAlgoGetHeuristic(
    void*, void*, void*, void*, void*, void*, void*, int, void*, int* found) {
  return *found = 1, 0;
}
