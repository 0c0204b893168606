"""Names of losses, metrics, optimizers, schedules and methods in other libraries, with their equivalents here.

Names that differ only by case, separators and a trailing "loss" are recognised without an entry. If there is no
equivalent, the value is advice instead of a name.
"""

LOSSES = {
    "binary_crossentropy": "bce", "binary_cross_entropy": "bce", "binary_cross_entropy_with_logits": "bce_with_logits",
    "categorical_crossentropy": "soft_cross_entropy", "categorical_focal_crossentropy": "focal",
    "binary_focal_crossentropy": "sigmoid_focal", "sigmoid_focal_loss": "sigmoid_focal",
    "box_iou": "iou", "generalized_box_iou": "giou", "distance_box_iou": "diou", "complete_box_iou": "ciou",
    "hungarian": "detr", "set_criterion": "detr", "multibox": "ssd", "lovasz_softmax": "lovasz",
    "contrastive": "info_nce", "cosine_similarity": "cosine_embedding", "ctc_loss": "ctc",
    "kullback_leibler_divergence": "kl_div", "kl_divergence": "kl_div", "kld": "kl_div", "log_loss": "cross_entropy",
    "mae": "l1", "mean_absolute_error": "l1", "mean_squared_error": "mse", "squared_error": "mse", "l2": "mse",
    "negative_log_likelihood": "nll", "nt_xent": "info_nce", "poisson": "poisson_nll",
    "softmax_cross_entropy": "cross_entropy", "sparse_categorical_crossentropy": "cross_entropy",
    "softmax_cross_entropy_with_integer_labels": "cross_entropy", "sigmoid_binary_cross_entropy": "bce_with_logits",
    "triplet_margin": "triplet", "triplet_semi_hard": "triplet",
}  # fmt: skip
METRICS = {
    "absolute_error": "mae", "accuracy_score": "accuracy", "acc": "accuracy",
    "auc": "roc_auc", "auroc": "roc_auc", "roc_auc_score": "roc_auc", "area_under_roc": "roc_auc",
    "average_precision_score": "average_precision", "pr_auc": "average_precision", "auprc": "average_precision",
    "balanced_accuracy_score": "balanced_accuracy",
    "brier_score": "brier", "brier_score_loss": "brier", "calibration_error": "ece",
    "expected_calibration_error": "ece",
    "categorical_accuracy": "accuracy", "sparse_categorical_accuracy": "accuracy", "binary_accuracy": "accuracy",
    "binary_crossentropy": "log_loss", "cross_entropy": "log_loss", "neg_log_loss": "log_loss", "nll": "log_loss",
    "cohen_kappa_score": "cohen_kappa", "kappa": "cohen_kappa", "explained_variance_score": "explained_variance",
    "f1_score": "f1", "fbeta_score": "f1", "jaccard_index": "iou", "jaccard_score": "iou", "mean_io_u": "iou",
    "matthews_corrcoef": "mcc", "matthews_corr_coef": "mcc", "matthews_correlation": "mcc",
    "mean_absolute_error": "mae", "mean_squared_error": "mse", "root_mean_squared_error": "rmse",
    "mean_absolute_percentage_error": "mape", "multilabel_exact_match": "exact_match", "subset_accuracy": "exact_match",
    "precision_score": "precision", "recall_score": "recall", "r2_score": "r2",
    "sparse_top_k_categorical_accuracy": "top_k", "top_k_categorical_accuracy": "top_k",
    "top_k_accuracy_score": "top_k",
    "char_error_rate": "cer", "character_error_rate": "cer", "label_error_rate": "cer", "word_error_rate": "wer",
    "levenshtein": "edit_distance", "editdistance": "edit_distance", "edit_distance_score": "edit_distance",
}  # fmt: skip
OPTIMIZERS = {
    "adam_w": "adamw", "adamw_torch": "adamw", "adamw_hf": "adamw", "adamw_torch_fused": "adamw",
    "adamw_apex_fused": "adamw", "adamw_bnb_8bit": "adamw", "adamw_8bit": "adamw", "paged_adamw_8bit": "adamw",
    "paged_adamw_32bit": "adamw", "lion_8bit": "lion", "lion_32bit": "lion", "paged_lion_8bit": "lion",
    "schedule_free_adam_w": "schedule_free_adamw", "nesterov": "sgd", "momentum": "sgd",
}  # fmt: skip
SCHEDULES = {
    "constant_lr": "constant", "constant_with_warmup": "warmup", "cosine_annealing_lr": "cosine",
    "cosine_annealing_warm_restarts": "cosine_restarts", "cosine_decay": "cosine",
    "cosine_decay_restarts": "cosine_restarts",
    "cosine_with_min_lr": "cosine", "cosine_with_restarts": "cosine_restarts", "exponential_decay": "exponential",
    "exponential_lr": "exponential", "inverse_sqrt": "inverse_square_root", "lambda_lr": "function",
    "linear_lr": "linear",
    "multi_step_lr": "multi_step", "one_cycle_lr": "one_cycle", "piecewise_constant_decay": "multi_step",
    "polynomial_decay": "polynomial", "polynomial_lr": "polynomial", "reduce_lr_on_plateau": "reduce_on_plateau",
    "sequential_lr": "sequential", "step_lr": "step_decay", "warmup_stable_decay": "warmup",
}  # fmt: skip
AUGMENTATIONS = {
    **dict.fromkeys(("horizontal_flip", "hflip", "random_flip", "random_horizontal_flip"), "flip"),
    **dict.fromkeys(("random_vertical_flip", "vflip"), "vertical_flip"),
    **dict.fromkeys(("random_rotation", "rotate", "random_rotate", "safe_rotate"), "rotation"),
    **dict.fromkeys(("random_affine", "shift_scale_rotate", "random_translation", "random_zoom"), "affine"),
    **dict.fromkeys(("erasing", "random_erase", "coarse_dropout", "cutout"), "random_erasing"),
    **dict.fromkeys(("colour_jitter", "color_jiggle", "random_brightness", "random_contrast",
                     "random_brightness_contrast"), "color_jitter"),
    "random_augment": "rand_augment", "inception_crop": "random_resized_crop", "pad_crop": "random_crop",
}  # fmt: skip

EXPLANATIONS = {
    "saliency": "gradient", "vanilla": "gradient", "ixg": "input-x-gradient", "ig": "integrated-gradients",
    "gradient-shap": "expected-gradients", "noise-tunnel": "smoothgrad", "smooth-grad": "smoothgrad",
    "guided-backprop": "guided-backpropagation", "gradcampp": "grad-cam-plus-plus", "layer-grad-cam": "grad-cam",
    "deep-lift": "deeplift", "conductance": "layer-conductance", "shapley-value-sampling": "shapley", "shap": "shapley",
}  # fmt: skip
_BUILD, _EXPORT = "gradgraph.build(model, loss, optimizer, metrics=…) first", "export(path)"
# methods of other libraries' training objects, with those of a Trainer
METHODS = {
    "backward": "step(batch)", "compile": _BUILD, "configure_optimizers": _BUILD, "get_weights": "state_dict()",
    "load_checkpoint": "load(path)", "load_weights": "load_state_dict(values)", "lr_find": "find_lr(data)",
    "partial_fit": "step(batch)", "predict_on_batch": "predict(x)", "predict_proba": "predict(x)",
    "push_to_hub": _EXPORT, "save_checkpoint": "save(path)", "save_model": _EXPORT, "save_pretrained": _EXPORT,
    "save_weights": "save(path)", "scale_batch_size": "find_batch_size(data)", "score": "evaluate(data)",
    "set_weights": "load_state_dict(values)", "summary": "definition.summary()", "test": "evaluate(data)",
    "to_onnx": _EXPORT, "train": "fit(data)", "train_on_batch": "step(batch)", "training_step": "step(batch)",
    "tune": "find_lr(data)", "validate": "evaluate(data)", "zero_grad": "step(batch)",
}  # fmt: skip
