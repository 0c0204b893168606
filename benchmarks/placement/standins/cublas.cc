// cuBLAS: one algorithm for every product.

extern "C" {
const char* cublasGetStatusName(int) { return "an error of the stand-in for cuBLAS"; }
const char* cublasGetStatusString(int) { return "an error of the stand-in for cuBLAS"; }
int cublasGetMathMode(void*, int* mode) { return *mode = 0, 0; }
}
