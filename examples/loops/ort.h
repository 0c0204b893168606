/* onnxruntime's C API: its own header if the compiler finds it, else the part that train.c and train.cc use, by position.
   (The table of functions only ever grows at the end, so this holds for every onnxruntime from 1.18 on.) */
#pragma once

#if defined(__has_include)
#if __has_include(<onnxruntime_c_api.h>)
#include <onnxruntime_c_api.h>
#define HAS_ONNXRUNTIME_HEADER
#endif
#endif

#ifndef HAS_ONNXRUNTIME_HEADER
#include <stddef.h>
#include <stdint.h>

#define ORT_API_VERSION 18
typedef struct OrtStatus OrtStatus;
typedef struct OrtEnv OrtEnv;
typedef struct OrtSession OrtSession;
typedef struct OrtSessionOptions OrtSessionOptions;
typedef struct OrtRunOptions OrtRunOptions;
typedef struct OrtMemoryInfo OrtMemoryInfo;
typedef struct OrtValue OrtValue;
typedef struct OrtAllocator OrtAllocator;
typedef struct OrtTensorTypeAndShapeInfo OrtTensorTypeAndShapeInfo;
typedef enum { ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT = 1, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64 = 7 } ONNXTensorElementDataType;
enum { ORT_LOGGING_LEVEL_WARNING = 2, OrtArenaAllocator = 1, OrtMemTypeDefault = 0 };

typedef struct OrtApi {
  void* to_2[2];
  const char* (*GetErrorMessage)(const OrtStatus*);
  OrtStatus* (*CreateEnv)(int level, const char* log, OrtEnv** out);
  void* to_7[3];
  OrtStatus* (*CreateSession)(const OrtEnv*, const char* path, const OrtSessionOptions*, OrtSession** out);
  void* to_9[1];
  OrtStatus* (*Run)(OrtSession*, const OrtRunOptions*, const char* const* input_names, const OrtValue* const* inputs,
                    size_t input_count, const char* const* output_names, size_t output_count, OrtValue** outputs);
  OrtStatus* (*CreateSessionOptions)(OrtSessionOptions** out);
  void* to_30[19];
  OrtStatus* (*SessionGetInputCount)(const OrtSession*, size_t* out);
  OrtStatus* (*SessionGetOutputCount)(const OrtSession*, size_t* out);
  void* to_36[4];
  OrtStatus* (*SessionGetInputName)(const OrtSession*, size_t index, OrtAllocator*, char** out);
  OrtStatus* (*SessionGetOutputName)(const OrtSession*, size_t index, OrtAllocator*, char** out);
  void* to_49[11];
  OrtStatus* (*CreateTensorWithDataAsOrtValue)(const OrtMemoryInfo*, void* data, size_t bytes, const int64_t* dims,
                                               size_t rank, ONNXTensorElementDataType, OrtValue** out);
  void* to_51[1];
  OrtStatus* (*GetTensorMutableData)(OrtValue*, void** out);
  void* to_64[12];
  OrtStatus* (*GetTensorShapeElementCount)(const OrtTensorTypeAndShapeInfo*, size_t* out);
  OrtStatus* (*GetTensorTypeAndShape)(const OrtValue*, OrtTensorTypeAndShapeInfo** out);
  void* to_69[3];
  OrtStatus* (*CreateCpuMemoryInfo)(int allocator, int kind, OrtMemoryInfo** out);
  void* to_78[8];
  OrtStatus* (*GetAllocatorWithDefaultOptions)(OrtAllocator** out);
  void* to_92[13];
  void (*ReleaseEnv)(OrtEnv*);
  void (*ReleaseStatus)(OrtStatus*);
  void (*ReleaseMemoryInfo)(OrtMemoryInfo*);
  void (*ReleaseSession)(OrtSession*);
  void (*ReleaseValue)(OrtValue*);
  void* to_99[2];
  void (*ReleaseTensorTypeAndShapeInfo)(OrtTensorTypeAndShapeInfo*);
  void (*ReleaseSessionOptions)(OrtSessionOptions*);
} OrtApi;

typedef struct OrtApiBase {
  const OrtApi* (*GetApi)(uint32_t version);
  const char* (*GetVersionString)(void);
} OrtApiBase;

#ifdef __cplusplus
extern "C"
#endif
const OrtApiBase* OrtGetApiBase(void);
#endif
