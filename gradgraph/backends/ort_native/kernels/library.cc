// The entry point that onnxruntime calls when it loads the library: it adds the operators to the session.

#include "kernels.h"

using namespace gradgraph;

namespace {

const ort::CustomOp* const kOperators[] = {
    &elementwise, &permute, &adam_update, &momentum_update, &layer_normalization_grad, &softmax_grad,
    &batch_normalization, &batch_normalization_grad, &unscaled_batch_normalization_grad, &max_pool_grad,
    &matmul, &packed_matmul, &attention_op, &attention_grad, &packed_attention_grad, &lstm, &lstm_grad, &conv, &conv_grad_input, &conv_grad_weight,
    &depthwise_conv, &depthwise_conv_grad_input, &depthwise_conv_grad_weight, &depthwise_conv_grad,
};

// Created once and never destroyed: sessions refer to it until they end, and processes end them in any order.
ort::Status* made(const ort::Api& api, ort::Domain*& domain) {
  if (ort::Status* status = api.CreateCustomOpDomain("gradgraph.native", &domain)) return status;
  for (const ort::CustomOp* op : kOperators) {
    if (ort::Status* status = api.CustomOpDomain_Add(domain, op)) return status;
  }
  return nullptr;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) ort::Status* RegisterCustomOps(ort::SessionOptions* options,
                                                                                 const ort::ApiBase* base) {
  const ort::Api* api = base->GetApi(ort::kApiVersion);
  if (api == nullptr) {
    std::string message = "the native kernels need onnxruntime 1." + std::to_string(ort::kApiVersion) +
                          " or later, and this is " + base->GetVersionString();
    return base->GetApi(1)->CreateStatus(ort::kFail, message.c_str());
  }
  static ort::Domain* domain = nullptr;
  static ort::Status* failed = made(*api, domain);
  if (failed != nullptr) return api->CreateStatus(ort::kFail, api->GetErrorMessage(failed));
  return api->AddCustomOpDomain(options, domain);
}
