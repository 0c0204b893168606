// Every operator of the library.
#pragma once

#include "kernel.h"

namespace gradgraph {

extern const ort::CustomOp adam_update, momentum_update;
extern const ort::CustomOp elementwise, permute;
extern const ort::CustomOp layer_normalization_grad, softmax_grad;
extern const ort::CustomOp batch_normalization, batch_normalization_grad, unscaled_batch_normalization_grad;
extern const ort::CustomOp max_pool_grad;
extern const ort::CustomOp matmul, packed_matmul;
extern const ort::CustomOp attention_op, attention_grad, packed_attention_grad;
extern const ort::CustomOp lstm, lstm_grad;
extern const ort::CustomOp conv, conv_grad_input, conv_grad_weight;
extern const ort::CustomOp depthwise_conv, depthwise_conv_grad_input, depthwise_conv_grad_weight, depthwise_conv_grad;

}  // namespace gradgraph
