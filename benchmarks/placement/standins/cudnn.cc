// cuDNN as far as onnxruntime needs it to find an engine for every operation, with no work space.

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

namespace {
constexpr int kInt64 = 3, kInt32 = 23;           // of cudnnBackendAttributeType_t
constexpr int kResults = 202, kEngine = 300;  // of cudnnBackendAttributeName_t
}

extern "C" {

size_t cudnnGetVersion() { return 91200; }
const char* cudnnGetErrorString(int) { return "an error of the stand-in for cuDNN"; }
void cudnnGetLastErrorString(char* text, size_t size) {
  if (size) *text = 0;
}

int cudnnBackendCreateDescriptor(int, void** out) { return *out = calloc(64, 1), 0; }
int cudnnBackendDestroyDescriptor(void* descriptor) { return free(descriptor), 0; }

// One engine in one configuration, without knobs and notes; what it needs of memory is 0.
int cudnnBackendGetAttribute(void*, int name, int type, int64_t wanted, int64_t* count, void* values) {
  bool number = type == kInt64 || type == kInt32;
  if (count) *count = number || name == kResults || name == kEngine;
  if (number && values && wanted > 0) memset(values, 0, type == kInt64 ? 8 : 4);
  return 0;
}

int cudnnDropoutGetStatesSize(void*, size_t* size) { return *size = 64, 0; }
int cudnnGetReductionIndicesSize(void*, void*, void*, void*, size_t* size) { return *size = 0, 0; }
int cudnnGetReductionWorkspaceSize(void*, void*, void*, void*, size_t* size) { return *size = 0, 0; }
int cudnnGetConvolutionForwardWorkspaceSize(void*, void*, void*, void*, void*, int, size_t* size) { return *size = 0, 0; }
int cudnnGetRNNTempSpaceSizes(void*, void*, int, void*, size_t* work, size_t* reserve) { return *work = *reserve = 0, 0; }
int cudnnGetStream(void*, void** stream) { return *stream = nullptr, 0; }

// Weights of recurrent layers: no tensor, so that nothing is copied to its place.
int cudnnGetRNNWeightParams(
    void*, void*, int, size_t, void* space, int, void*, void** matrix, void*, void** bias) {
  return *matrix = *bias = space, 0;
}
int cudnnGetTensorNdDescriptor(void*, int wanted, int* type, int* rank, int* sizes, int* strides) {
  for (int i = 0; i < wanted; ++i) sizes[i] = strides[i] = 0;
  return *type = *rank = 0, 0;
}
}
