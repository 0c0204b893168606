// Trains a step folder in onnxruntime, in C++17 over its C API:
//
//     c++ -std=c++17 -O2 train.cc -o train -L<onnxruntime>/lib -lonnxruntime && ./train run/step run/
//
// As train.c; memory is freed by itself (see docs/how-to/loops.md).

#include <cstdio>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "json.h"
#include "ort.h"

namespace {

constexpr int64_t kBatch = 16;
constexpr int kEpochs = 5;

const OrtApi& api = *OrtGetApiBase()->GetApi(ORT_API_VERSION);

void check(OrtStatus* status) {
  if (status == nullptr) return;
  std::string message = api.GetErrorMessage(status);
  api.ReleaseStatus(status);
  throw std::runtime_error(message);
}

struct Release {
  void operator()(OrtValue* value) const { api.ReleaseValue(value); }
  void operator()(OrtSession* session) const { api.ReleaseSession(session); }
};
using Value = std::shared_ptr<OrtValue>;  // the state and a batch may hold the same
using Tensors = std::map<std::string, Value>;

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path);
  return {std::istreambuf_iterator<char>(file), {}};
}

template <class T>
T* data_of(const Value& value) {
  void* data;
  check(api.GetTensorMutableData(value.get(), &data));
  return static_cast<T*>(data);
}

size_t size_of(const Value& value) {
  OrtTensorTypeAndShapeInfo* shape;
  size_t size;
  check(api.GetTensorTypeAndShape(value.get(), &shape));
  check(api.GetTensorShapeElementCount(shape, &size));
  api.ReleaseTensorTypeAndShapeInfo(shape);
  return size;
}

// A tensor over memory of somebody else.
Value tensor_over(void* data, size_t bytes, const std::vector<int64_t>& dims, ONNXTensorElementDataType type) {
  static OrtMemoryInfo* const memory = [] {
    OrtMemoryInfo* made;
    check(api.CreateCpuMemoryInfo(OrtArenaAllocator, OrtMemTypeDefault, &made));
    return made;
  }();
  OrtValue* value;
  check(api.CreateTensorWithDataAsOrtValue(memory, data, bytes, dims.data(), dims.size(), type, &value));
  return {value, Release()};
}

class Model {
 public:
  Model(const OrtEnv* env, const OrtSessionOptions* options, const std::string& path) {
    OrtSession* made;
    OrtAllocator* allocator;
    size_t inputs, outputs;
    check(api.CreateSession(env, path.c_str(), options, &made));
    session_.reset(made);
    check(api.GetAllocatorWithDefaultOptions(&allocator));
    check(api.SessionGetInputCount(made, &inputs));
    check(api.SessionGetOutputCount(made, &outputs));
    inputs_.resize(inputs);
    outputs_.resize(outputs);
    for (size_t i = 0; i < inputs; ++i) check(api.SessionGetInputName(made, i, allocator, &inputs_[i]));
    for (size_t i = 0; i < outputs; ++i) check(api.SessionGetOutputName(made, i, allocator, &outputs_[i]));
  }

  // Feeds each input from the tensor of its name.
  Tensors run(const Tensors& known) const {
    std::vector<const OrtValue*> fed;
    for (const char* name : inputs_) {
      auto found = known.find(name);
      if (found == known.end()) throw std::runtime_error(std::string("nothing to feed ") + name);
      fed.push_back(found->second.get());
    }
    std::vector<OrtValue*> given(outputs_.size());
    check(api.Run(session_.get(), nullptr, inputs_.data(), fed.data(), fed.size(), outputs_.data(), outputs_.size(),
                  given.data()));
    Tensors results;
    for (size_t i = 0; i < given.size(); ++i) results.emplace(outputs_[i], Value(given[i], Release()));
    return results;
  }

 private:
  std::unique_ptr<OrtSession, Release> session_;
  std::vector<char*> inputs_, outputs_;  // kept until the program ends
};

// An input or target: all its rows.
struct Column {
  std::string name, rows;
  std::vector<int64_t> dims;
  ONNXTensorElementDataType type;
  size_t row_bytes;

  Column(const Json* spec, const std::string& folder) : name(json_get(spec, "name")->text) {
    rows = read_file(folder + "/" + name + ".bin");
    const std::string dtype = json_get(spec, "dtype")->text;
    if (dtype != "float32" && dtype != "int64") throw std::runtime_error("this loop feeds no " + dtype);
    type = dtype == "int64" ? ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64 : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
    row_bytes = dtype == "int64" ? 8 : 4;
    for (const Json* d = json_get(spec, "shape")->first; d; d = d->next) {
      if (!dims.empty()) row_bytes *= static_cast<size_t>(d->number);
      dims.push_back(dims.empty() ? kBatch : static_cast<int64_t>(d->number));
    }
  }

  size_t count() const { return rows.size() / row_bytes; }
  Value batch(size_t begin) { return tensor_over(rows.data() + begin * row_bytes, kBatch * row_bytes, dims, type); }
};

void train_in(const std::string& folder, const std::string& data) {
  OrtEnv* env;
  OrtSessionOptions* options;
  check(api.CreateEnv(ORT_LOGGING_LEVEL_WARNING, "train", &env));
  check(api.CreateSessionOptions(&options));
  const Model init(env, options, folder + "/init.onnx"), train(env, options, folder + "/train.onnx"),
      eval(env, options, folder + "/eval.onnx");
  Json manifest{};
  json_value(read_file(folder + "/manifest.json").c_str(), &manifest);
  const std::string loss = json_get(&manifest, "loss_output")->text;

  std::vector<Column> columns;
  for (const char* list : {"inputs", "targets"})
    for (const Json* s = json_get(&manifest, list)->first; s; s = s->next) columns.emplace_back(s, data);
  for (const Column& column : columns)
    if (column.rows.size() != columns[0].count() * column.row_bytes)
      throw std::runtime_error(column.name + ".bin has not as many rows as the first input");
  std::map<std::string, float> rates;
  Tensors known;  // batch, hyperparameters and state, by name
  for (const Json* h = json_get(&manifest, "hyperparameters")->first; h; h = h->next) {
    float& rate = rates[h->key] = static_cast<float>(h->number);
    known[h->key] = tensor_over(&rate, sizeof rate, {}, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT);
  }
  known.merge(init.run({}));

  const auto feed = [&](size_t begin) {
    for (Column& column : columns) known[column.name] = column.batch(begin);
  };
  for (int epoch = 0; epoch < kEpochs; ++epoch)
    for (size_t begin = 0; begin + kBatch <= columns[0].count(); begin += kBatch) {
      feed(begin);
      Tensors found = train.run(known);
      for (const Json* s = json_get(&manifest, "state")->first; s; s = s->next)
        known[json_get(s, "name")->text] = found.at(json_get(s, "next")->text);
      std::printf("%.6f\n", *data_of<float>(found.at(loss)));
    }
  feed(0);
  Tensors used = known;  // averages in place of weights, where the optimizer keeps some
  if (const Json* averages = json_find(&manifest, "averages"))
    for (const Json* a = averages->first; a; a = a->next) used[a->key] = known.at(a->text);
  std::printf("eval %.6f\n", *data_of<float>(eval.run(used).at(loss)));

  std::ofstream weights(data + "/weights.bin", std::ios::binary);
  for (const Json* s = json_get(&manifest, "state")->first; s; s = s->next) {
    if (std::string(json_get(s, "kind")->text) != "parameter") continue;
    const Value& value = used.at(json_get(s, "name")->text);
    weights.write(data_of<char>(value), static_cast<std::streamsize>(size_of(value) * sizeof(float)));
  }
  if (!weights.flush()) throw std::runtime_error("cannot write " + data + "/weights.bin");
  api.ReleaseSessionOptions(options);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return std::fprintf(stderr, "usage: train STEP DATA\n"), 2;
  try {
    train_in(argv[1], argv[2]);
  } catch (const std::exception& error) {
    return std::fprintf(stderr, "%s\n", error.what()), 1;
  }
}
