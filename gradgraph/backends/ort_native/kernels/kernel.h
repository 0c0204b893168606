// How a kernel is written: a class with a signature, a constructor that reads attributes, and `compute`.
//
//   struct ReluGrad {
//     static constexpr Signature signature{"ReluGrad", 2, 1};
//     explicit ReluGrad(const Attributes&) {}
//     void compute(Context& context) const { ... }
//   };
//   const CustomOp relu_grad = op<ReluGrad>();
//
// Everything is float32 unless the signature says otherwise. A kernel throws std::runtime_error, which
// becomes the session's error.
#pragma once

#include <algorithm>
#include <array>
#include <exception>
#include <initializer_list>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "ort_abi.h"

namespace gradgraph {

constexpr size_t kMaxRank = 8;

// Elements that one thread processes at a time: enough to be worth scheduling, few enough to balance threads.
constexpr size_t kGrain = 1 << 14;

struct Signature {
  const char* name;
  size_t inputs;
  size_t outputs;
  size_t optional = 0;   // the number of last inputs that may be absent
  int integer = -1;      // the input that is int64
  bool in_place = false; // the first output may use the memory of the first input if no other node reads it
  bool variadic = false; // any number of inputs and of outputs
  unsigned bytes = 0;    // bit i: input i is uint8
};

struct Dims {
  std::array<int64_t, kMaxRank> size{};
  size_t rank = 0;

  // Elements along the axes from `first` up to `last`.
  size_t count(size_t first, size_t last) const {
    size_t n = 1;
    for (size_t i = first; i < last; ++i) n *= static_cast<size_t>(size[i]);
    return n;
  }
  size_t count() const { return count(0, rank); }
};

template <class T>
struct Tensor {
  T* data = nullptr;
  Dims dims;
  size_t count = 0;
};

inline void check(const ort::Api& api, ort::Status* status) {
  if (status == nullptr) return;
  std::string message = api.GetErrorMessage(status);
  api.ReleaseStatus(status);
  throw std::runtime_error(message);
}

// The attributes of a node, and which of its inputs are constant.
class Attributes {
 public:
  Attributes(const ort::Api& api, const ort::KernelInfo* info) : api_(api), info_(info) {}

  float real(const char* name) const {
    float value = 0;
    check(api_, api_.KernelInfoGetAttribute_float(info_, name, &value));
    return value;
  }

  int64_t integer(const char* name) const {
    int64_t value = 0;
    check(api_, api_.KernelInfoGetAttribute_int64(info_, name, &value));
    return value;
  }

  // The same for an attribute that may be absent.
  int64_t integer(const char* name, int64_t otherwise) const {
    int64_t value = 0;
    ort::Status* status = api_.KernelInfoGetAttribute_int64(info_, name, &value);
    if (status == nullptr) return value;
    api_.ReleaseStatus(status);
    return otherwise;
  }

  bool is_constant(size_t input) const {
    int constant = 0;
    const ort::Value* value = nullptr;
    check(api_, api_.KernelInfoGetConstantInput_tensor(info_, input, &constant, &value));
    return constant != 0;
  }

  std::string text(const char* name) const {
    size_t size = 0;
    check(api_, api_.KernelInfoGetAttribute_string(info_, name, nullptr, &size));  // including the terminating 0
    std::string value(size, '\0');
    check(api_, api_.KernelInfoGetAttribute_string(info_, name, value.data(), &size));
    value.resize(size == 0 ? 0 : size - 1);
    return value;
  }

  std::vector<int64_t> every_integer(const char* name) const {
    return every<int64_t>(api_.KernelInfoGetAttributeArray_int64, name);
  }

  std::vector<float> every_real(const char* name) const {
    return every<float>(api_.KernelInfoGetAttributeArray_float, name);
  }

  template <size_t N>
  std::array<int64_t, N> integers(const char* name) const {
    return numbers<int64_t, N>(api_.KernelInfoGetAttributeArray_int64, name);
  }

  template <size_t N>
  std::array<float, N> reals(const char* name) const {
    return numbers<float, N>(api_.KernelInfoGetAttributeArray_float, name);
  }

 private:
  template <class T, class Get>
  std::vector<T> every(Get get, const char* name) const {
    size_t count = 0;
    check(api_, get(info_, name, nullptr, &count));
    std::vector<T> values(count);
    if (count > 0) check(api_, get(info_, name, values.data(), &count));
    return values;
  }

  template <class T, size_t N, class Get>
  std::array<T, N> numbers(Get get, const char* name) const {
    std::array<T, N> values{};
    size_t count = N;
    check(api_, get(info_, name, values.data(), &count));
    if (count != N) throw std::runtime_error(std::string(name) + " should be " + std::to_string(N) + " numbers");
    return values;
  }

  const ort::Api& api_;
  const ort::KernelInfo* info_;
};

// One run of a node: its tensors, and the session's threads.
class Context {
 public:
  Context(const ort::Api& api, ort::KernelContext* context) : api_(api), context_(context) {}

  size_t inputs() const {
    size_t count = 0;
    check(api_, api_.KernelContext_GetInputCount(context_, &count));
    return count;
  }

  size_t outputs() const {
    size_t count = 0;
    check(api_, api_.KernelContext_GetOutputCount(context_, &count));
    return count;
  }

  bool has(size_t index) const {
    if (index >= inputs()) return false;
    const ort::Value* value = nullptr;
    check(api_, api_.KernelContext_GetInput(context_, index, &value));
    return value != nullptr;
  }

  template <class T = float>
  Tensor<const T> input(size_t index) const {
    const ort::Value* value = nullptr;
    check(api_, api_.KernelContext_GetInput(context_, index, &value));
    if (value == nullptr) throw std::runtime_error("input " + std::to_string(index) + " is missing");
    Tensor<const T> tensor;
    tensor.dims = dims_of(value);
    tensor.count = tensor.dims.count();
    tensor.data = static_cast<const T*>(memory_of(const_cast<ort::Value*>(value)));
    return tensor;
  }

  // Returns the only element of an input.
  float scalar(size_t index) const {
    Tensor<const float> tensor = input(index);
    if (tensor.count != 1) throw std::runtime_error("input " + std::to_string(index) + " should have one element");
    return *tensor.data;
  }

  Tensor<float> output(size_t index, const Dims& dims) {
    ort::Value* value = nullptr;
    check(api_, api_.KernelContext_GetOutput(context_, index, dims.size.data(), dims.rank, &value));
    return {static_cast<float*>(memory_of(value)), dims, dims.count()};
  }

  // Calls body(begin, end) for [0, count), in pieces of `grain`, on the session's threads.
  template <class Body>
  void parallel(size_t count, size_t grain, const Body& body) const {
    if (count == 0) return;
    if (count <= grain) return body(size_t{0}, count);
    struct Work {
      const Body& body;
      size_t count, grain;
    } work{body, count, grain};
    auto piece = [](void* data, size_t i) {
      const Work& w = *static_cast<const Work*>(data);
      w.body(i * w.grain, std::min(w.count, (i + 1) * w.grain));
    };
    check(api_, api_.KernelContext_ParallelFor(context_, piece, (count + grain - 1) / grain, 0, &work));
  }

 private:
  void* memory_of(ort::Value* value) const {
    void* data = nullptr;
    check(api_, api_.GetTensorMutableData(value, &data));
    return data;
  }

  Dims dims_of(const ort::Value* value) const {
    ort::Shape* shape = nullptr;
    check(api_, api_.GetTensorTypeAndShape(value, &shape));
    Dims dims;
    ort::Status* status = api_.GetDimensionsCount(shape, &dims.rank);
    const bool fits = dims.rank <= kMaxRank;
    if (status == nullptr && fits) status = api_.GetDimensions(shape, dims.size.data(), dims.rank);
    api_.ReleaseShape(shape);
    check(api_, status);
    if (!fits) throw std::runtime_error("a tensor has more than " + std::to_string(kMaxRank) + " axes");
    return dims;
  }

  const ort::Api& api_;
  ort::KernelContext* context_;
};

inline void same_count(const Tensor<const float>& x, std::initializer_list<Tensor<const float>> others) {
  for (const Tensor<const float>& other : others) {
    if (other.count != x.count) throw std::runtime_error("its tensors differ in size");
  }
}

// --- the operator that onnxruntime sees ------------------------------------------------------------------------------

template <class Kernel>
struct Bound {
  const ort::Api& api;
  Kernel kernel;
};

inline ort::Status* failure(const ort::Api& api, const char* name) {
  try {
    throw;
  } catch (const std::exception& error) {
    return api.CreateStatus(ort::kFail, (std::string(name) + ": " + error.what()).c_str());
  } catch (...) {
    return api.CreateStatus(ort::kFail, name);
  }
}

template <class Kernel>
constexpr ort::CustomOp op() {
  using ort::CustomOp;
  ort::CustomOp made{};
  made.version = ort::kApiVersion;
  made.GetName = [](const CustomOp*) { return Kernel::signature.name; };
  made.GetExecutionProviderType = [](const CustomOp*) -> const char* { return nullptr; };  // the CPU
  made.GetInputTypeCount = [](const CustomOp*) { return Kernel::signature.inputs; };
  made.GetOutputTypeCount = [](const CustomOp*) { return Kernel::signature.outputs; };
  made.GetInputType = [](const CustomOp*, size_t i) -> int {
    if (Kernel::signature.bytes >> i & 1) return ort::kUint8;
    return static_cast<int>(i) == Kernel::signature.integer ? ort::kInt64 : ort::kFloat;
  };
  made.GetOutputType = [](const CustomOp*, size_t) -> int { return ort::kFloat; };
  made.GetInputCharacteristic = [](const CustomOp*, size_t i) -> int {
    if (Kernel::signature.variadic) return ort::kVariadic;
    return i + Kernel::signature.optional < Kernel::signature.inputs ? ort::kRequired : ort::kOptional;
  };
  made.GetOutputCharacteristic = [](const CustomOp*, size_t) -> int {
    return Kernel::signature.variadic ? ort::kVariadic : ort::kRequired;
  };
  made.GetInputMemoryType = [](const CustomOp*, size_t) -> int { return ort::kDefault; };
  made.GetVariadicInputMinArity = [](const CustomOp*) { return 1; };
  made.GetVariadicInputHomogeneity = [](const CustomOp*) { return 1; };
  made.GetVariadicOutputMinArity = [](const CustomOp*) { return 1; };
  made.GetVariadicOutputHomogeneity = [](const CustomOp*) { return 1; };
  made.GetStartVersion = [](const CustomOp*) { return 1; };
  made.GetEndVersion = [](const CustomOp*) { return 1; };
  made.CreateKernelV2 = [](const CustomOp*, const ort::Api* api, const ort::KernelInfo* info,
                           void** kernel) -> ort::Status* {
    try {
      *kernel = new Bound<Kernel>{*api, Kernel(Attributes(*api, info))};
      return nullptr;
    } catch (...) {
      return failure(*api, Kernel::signature.name);
    }
  };
  made.KernelComputeV2 = [](void* kernel, ort::KernelContext* given) -> ort::Status* {
    const auto& bound = *static_cast<const Bound<Kernel>*>(kernel);
    try {
      Context context(bound.api, given);
      bound.kernel.compute(context);
      return nullptr;
    } catch (...) {
      return failure(bound.api, Kernel::signature.name);
    }
  };
  made.KernelDestroy = [](void* kernel) { delete static_cast<Bound<Kernel>*>(kernel); };
  if (Kernel::signature.in_place) {
    made.GetMayInplace = [](int** inputs, int** outputs) -> size_t {
      *inputs = new (std::nothrow) int(0);
      *outputs = new (std::nothrow) int(0);
      return *inputs != nullptr && *outputs != nullptr ? 1 : 0;
    };
    made.ReleaseMayInplace = [](int* inputs, int* outputs) {
      delete inputs;
      delete outputs;
    };
  }
  return made;
}

}  // namespace gradgraph
