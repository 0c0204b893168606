// A library of custom operators: my.ops.Snake, y = x + sin²(alpha·x)/alpha, and my.ops.SnakeSlope, its derivative.
#include <cmath>
#include <vector>

#include "ort_abi.h"

using namespace gradgraph::ort;

namespace {

const Api* api;

float snake(float x, float alpha) {
  const float s = std::sin(alpha * x);
  return x + s * s / alpha;
}
float slope(float x, float alpha) { return 1 + std::sin(2 * alpha * x); }

template <float (*f)(float, float)>
struct Op : CustomOp {
  const char* name;

  explicit Op(const char* its_name) : CustomOp{}, name(its_name) {
    version = kApiVersion;
    GetName = [](const CustomOp* op) { return static_cast<const Op*>(op)->name; };
    GetExecutionProviderType = [](const CustomOp*) -> const char* { return nullptr; };
    GetInputTypeCount = GetOutputTypeCount = [](const CustomOp*) -> size_t { return 1; };
    GetInputType = GetOutputType = [](const CustomOp*, size_t) -> int { return kFloat; };
    GetInputCharacteristic = GetOutputCharacteristic = [](const CustomOp*, size_t) -> int { return kRequired; };
    GetInputMemoryType = [](const CustomOp*, size_t) -> int { return kDefault; };
    GetStartVersion = [](const CustomOp*) { return 1; };
    GetEndVersion = [](const CustomOp*) { return 1 << 30; };
    CreateKernelV2 = [](const CustomOp*, const Api*, const KernelInfo* info, void** kernel) -> Status* {
      auto* alpha = new float(1);
      if (Status* missing = api->KernelInfoGetAttribute_float(info, "alpha", alpha)) api->ReleaseStatus(missing);
      *kernel = alpha;
      return nullptr;
    };
    KernelDestroy = [](void* kernel) { delete static_cast<float*>(kernel); };
    KernelComputeV2 = [](void* kernel, KernelContext* context) -> Status* {
      const Value* x;
      Value* y;
      Shape* shape;
      size_t rank, size = 1;
      if (Status* s = api->KernelContext_GetInput(context, 0, &x)) return s;
      if (Status* s = api->GetTensorTypeAndShape(x, &shape)) return s;
      if (Status* s = api->GetDimensionsCount(shape, &rank)) return s;
      std::vector<int64_t> dims(rank);
      if (Status* s = api->GetDimensions(shape, dims.data(), rank)) return s;
      api->ReleaseShape(shape);
      for (int64_t d : dims) size *= d;
      if (Status* s = api->KernelContext_GetOutput(context, 0, dims.data(), rank, &y)) return s;
      void *in, *out;
      if (Status* s = api->GetTensorMutableData(const_cast<Value*>(x), &in)) return s;
      if (Status* s = api->GetTensorMutableData(y, &out)) return s;
      for (size_t i = 0; i < size; ++i)
        static_cast<float*>(out)[i] = f(static_cast<float*>(in)[i], *static_cast<float*>(kernel));
      return nullptr;
    };
  }
};

const Op<snake> kSnake("Snake");
const Op<slope> kSlope("SnakeSlope");

}  // namespace

extern "C" __attribute__((visibility("default"))) Status* RegisterCustomOps(SessionOptions* options,
                                                                            const ApiBase* base) {
  api = base->GetApi(kApiVersion);
  static Domain* domain = nullptr;
  if (domain == nullptr) {
    if (Status* s = api->CreateCustomOpDomain("my.ops", &domain)) return s;
    if (Status* s = api->CustomOpDomain_Add(domain, &kSnake)) return s;
    if (Status* s = api->CustomOpDomain_Add(domain, &kSlope)) return s;
  }
  return api->AddCustomOpDomain(options, domain);
}
