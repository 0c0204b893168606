"""The node tests that cannot be held to everything, and why; keys are names of tests, or operators.

Every entry is checked: one that is no longer needed fails the suite.
"""

from __future__ import annotations

from collections.abc import Mapping

INFINITE = "the output is not finite"
EMPTY = "the output is empty"
EIGHT_BITS = "the input holds NaN and infinities of 8-bit floats"

# no derivative can be measured
NOT_CLEAN = {
    "test_acosh_example": "the slope at 1 is infinite",
    "test_attention_4d_with_past_and_present_qk_matmul_bias_3d_mask_causal": INFINITE,
    "test_attention_4d_with_past_and_present_qk_matmul_bias_4d_mask_causal": INFINITE,
    "test_castlike_FLOAT8E4M3FNUZ_to_FLOAT": EIGHT_BITS,
    "test_castlike_FLOAT8E4M3FNUZ_to_FLOAT16": EIGHT_BITS,
    "test_castlike_FLOAT8E4M3FN_to_FLOAT": EIGHT_BITS,
    "test_castlike_FLOAT8E4M3FN_to_FLOAT16": EIGHT_BITS,
    "test_castlike_FLOAT8E5M2FNUZ_to_FLOAT": EIGHT_BITS,
    "test_castlike_FLOAT8E5M2FNUZ_to_FLOAT16": EIGHT_BITS,
    "test_castlike_FLOAT8E5M2_to_FLOAT": EIGHT_BITS,
    "test_castlike_FLOAT8E5M2_to_FLOAT16": EIGHT_BITS,
    "test_reduce_log_sum_empty_set": INFINITE,
    "test_reduce_log_sum_exp_empty_set": INFINITE,
    "test_reduce_max_empty_set": INFINITE,
    "test_reduce_min_empty_set": INFINITE,
    "test_reduce_sum_empty_set_non_reduced_axis_zero": EMPTY,
    "test_reshape_allowzero_reordered": EMPTY,
    "test_scan_sum": "the batched form of opset 8, which no runtime implements any more",
    "test_slice_start_out_of_bounds": EMPTY,
    "test_split_zero_size_splits_opset13": EMPTY,
    "test_split_zero_size_splits_opset18": EMPTY,
}

# central differences are taken in the normal form, whose values other tests check
IN_NORMAL_FORM = {
    "LinearAttention": "the reference computes in float32 inside",
    "Scatter": "the reference has no kernel",
    "test_attention_24_qk_matmul_output_mode3_softmax_precision": "the reference computes in float32 inside",
    "test_causal_conv_with_state_silu": "the reference computes in float32 inside",
    "test_causal_conv_with_state_silu_fp16": "the reference computes in float32 inside",
    "test_causal_conv_with_state_silu_with_past_state": "the reference computes in float32 inside",
    "test_causal_conv_with_state_swish_alias": "the reference computes in float32 inside",
    "test_convtranspose_autopad_same": "the float64 kernel knows explicit pads only",
    "test_convtranspose_kernel_shape": "the float64 kernel knows explicit pads only",
    "test_convtranspose_output_shape": "the float64 kernel knows explicit pads only",
}


# refused with an error
REFUSED = {
    "test_loop16_seq_none": "its body says that it builds a sequence of scalars, and inserts vectors",
}

# the gradient is not run there
NOT_IN_ONNXRUNTIME = {
    "test_castlike_FLOAT4E2M1_to_FLOAT": "it knows no such type",
    "test_castlike_FLOAT4E2M1_to_FLOAT16": "it knows no such type",
    "test_castlike_INT2_to_FLOAT": "it knows no such type",
    "test_castlike_INT2_to_FLOAT16": "it knows no such type",
    "test_castlike_UINT2_to_FLOAT": "it knows no such type",
    "test_castlike_UINT2_to_FLOAT16": "it knows no such type",
    "test_dequantizelinear_float4e2m1": "it knows no such type",
    "test_dequantizelinear_int2": "it knows no such type",
    "test_dequantizelinear_uint2": "it knows no such type",
    "test_pow_types_float32_uint32": "it has no kernel for unsigned exponents",
    "test_pow_types_float32_uint64": "it has no kernel for unsigned exponents",
    "test_resize_downsample_scales_cubic_align_corners": "it rounds the scaled size before it aligns the corners",
    "test_resize_downsample_scales_linear_align_corners": "it rounds the scaled size before it aligns the corners",
    "test_training_dropout": "it draws another mask",
    "test_training_dropout_default": "it draws another mask",
    "test_training_dropout_default_mask": "it draws another mask",
    "test_training_dropout_mask": "it draws another mask",
}

# operators that no node test with floating inputs and outputs is about
NO_CASES = {
    "ConcatFromSequence": "the cases are in the rule kit",
    "GlobalLpPool": "the cases are in the rule kit",
    "If": "the cases are in the rule kit",
    "MaxRoiPool": "the cases are in the rule kit",
    "Optional": "the cases are in the rule kit",
    "SequenceAt": "the cases are in the rule kit",
    "SequenceConstruct": "the cases are in the rule kit",
    "SequenceErase": "the cases are in the rule kit",
    "SequenceInsert": "the cases are in the rule kit",
    "Trilu": "the cases are in the rule kit",
}


def listed(table: Mapping[str, str], name: str, operator: str) -> bool:
    return name in table or operator in table
