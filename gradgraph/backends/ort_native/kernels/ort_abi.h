// The part of onnxruntime's C ABI that the kernels use, declared by position. Its table of functions only grows at the
// end, so these declarations are valid for every onnxruntime from the version below on. (Its wheels contain no header.)
#pragma once

#include <cstddef>
#include <cstdint>

namespace gradgraph::ort {

constexpr uint32_t kApiVersion = 18;  // onnxruntime 1.18: the first version with all of these functions

enum ElementType : int { kFloat = 1, kUint8 = 2, kInt64 = 7 };
enum Characteristic : int { kRequired = 0, kOptional = 1, kVariadic = 2 };
enum MemoryType : int { kDefault = 0 };
enum ErrorCode : int { kFail = 1 };

// owned by onnxruntime; the kernels never access their content
struct Status;
struct Value;
struct Shape;
struct Domain;
struct SessionOptions;
struct KernelInfo;
struct KernelContext;
struct ShapeContext;

using Unused = void (*)();

struct Api {
  Status* (*CreateStatus)(int code, const char* message);
  Unused before_2[1];
  const char* (*GetErrorMessage)(const Status*);
  Unused before_26[23];
  Status* (*CreateCustomOpDomain)(const char* name, Domain** out);
  Status* (*CustomOpDomain_Add)(Domain*, const struct CustomOp*);
  Status* (*AddCustomOpDomain)(SessionOptions*, Domain*);
  Unused before_51[22];
  Status* (*GetTensorMutableData)(Value*, void** out);
  Unused before_60[8];
  Status* (*GetTensorElementType)(const Shape*, int* out);
  Status* (*GetDimensionsCount)(const Shape*, size_t* out);
  Status* (*GetDimensions)(const Shape*, int64_t* dims, size_t count);
  Unused before_65[2];
  Status* (*GetTensorTypeAndShape)(const Value*, Shape** out);
  Unused before_85[19];
  Status* (*KernelInfoGetAttribute_float)(const KernelInfo*, const char* name, float* out);
  Status* (*KernelInfoGetAttribute_int64)(const KernelInfo*, const char* name, int64_t* out);
  Status* (*KernelInfoGetAttribute_string)(const KernelInfo*, const char* name, char* out, size_t* size);
  Status* (*KernelContext_GetInputCount)(const KernelContext*, size_t* out);
  Status* (*KernelContext_GetOutputCount)(const KernelContext*, size_t* out);
  Status* (*KernelContext_GetInput)(const KernelContext*, size_t index, const Value** out);
  Status* (*KernelContext_GetOutput)(KernelContext*, size_t index, const int64_t* dims, size_t count, Value** out);
  Unused before_93[1];
  void (*ReleaseStatus)(Status*);
  Unused before_99[5];
  void (*ReleaseShape)(Shape*);
  Unused before_162[62];
  Status* (*KernelInfoGetAttributeArray_float)(const KernelInfo*, const char* name, float* out, size_t* count);
  Status* (*KernelInfoGetAttributeArray_int64)(const KernelInfo*, const char* name, int64_t* out, size_t* count);
  Unused before_249[85];
  Status* (*KernelInfoGetConstantInput_tensor)(const KernelInfo*, size_t index, int* is_constant, const Value** out);
  Unused before_274[24];
  Status* (*KernelContext_ParallelFor)(const KernelContext*, void (*body)(void*, size_t), size_t total, size_t batches,
                                       void* data);
};

#define GRADGRAPH_AT(name, slot) \
  static_assert(offsetof(Api, name) == (slot) * sizeof(void*), #name " is not where onnxruntime has it")
GRADGRAPH_AT(GetErrorMessage, 2);
GRADGRAPH_AT(CreateCustomOpDomain, 26);
GRADGRAPH_AT(AddCustomOpDomain, 28);
GRADGRAPH_AT(GetTensorMutableData, 51);
GRADGRAPH_AT(GetTensorElementType, 60);
GRADGRAPH_AT(GetTensorTypeAndShape, 65);
GRADGRAPH_AT(KernelInfoGetAttribute_float, 85);
GRADGRAPH_AT(KernelContext_GetInputCount, 88);
GRADGRAPH_AT(KernelContext_GetInput, 90);
GRADGRAPH_AT(ReleaseStatus, 93);
GRADGRAPH_AT(ReleaseShape, 99);
GRADGRAPH_AT(KernelInfoGetAttributeArray_float, 162);
GRADGRAPH_AT(KernelInfoGetConstantInput_tensor, 249);
GRADGRAPH_AT(KernelContext_ParallelFor, 274);
#undef GRADGRAPH_AT

struct ApiBase {
  const Api* (*GetApi)(uint32_t version);
  const char* (*GetVersionString)();
};

// An operator with one kernel. onnxruntime reads the members that ``version`` implies.
struct CustomOp {
  uint32_t version;
  void* (*CreateKernel)(const CustomOp*, const Api*, const KernelInfo*);
  const char* (*GetName)(const CustomOp*);
  const char* (*GetExecutionProviderType)(const CustomOp*);
  int (*GetInputType)(const CustomOp*, size_t index);
  size_t (*GetInputTypeCount)(const CustomOp*);
  int (*GetOutputType)(const CustomOp*, size_t index);
  size_t (*GetOutputTypeCount)(const CustomOp*);
  void (*KernelCompute)(void* kernel, KernelContext*);
  void (*KernelDestroy)(void* kernel);
  int (*GetInputCharacteristic)(const CustomOp*, size_t index);
  int (*GetOutputCharacteristic)(const CustomOp*, size_t index);
  int (*GetInputMemoryType)(const CustomOp*, size_t index);
  int (*GetVariadicInputMinArity)(const CustomOp*);
  int (*GetVariadicInputHomogeneity)(const CustomOp*);
  int (*GetVariadicOutputMinArity)(const CustomOp*);
  int (*GetVariadicOutputHomogeneity)(const CustomOp*);
  Status* (*CreateKernelV2)(const CustomOp*, const Api*, const KernelInfo*, void** kernel);
  Status* (*KernelComputeV2)(void* kernel, KernelContext*);
  Status* (*InferOutputShapeFn)(const CustomOp*, ShapeContext*);
  int (*GetStartVersion)(const CustomOp*);
  int (*GetEndVersion)(const CustomOp*);
  size_t (*GetMayInplace)(int** inputs, int** outputs);
  void (*ReleaseMayInplace)(int* inputs, int* outputs);
  size_t (*GetAliasMap)(int** inputs, int** outputs);
  void (*ReleaseAliasMap)(int* inputs, int* outputs);
};

}  // namespace gradgraph::ort
