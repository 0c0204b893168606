"""Names of arguments in other libraries, and their equivalents in gradgraph, in Python and on the command line."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

# functions whose arguments users may pass to another function by mistake, by public name, in search order
OWN = {
    "build": "building.pipeline:build",
    "Trainer": "runtime.trainer:Trainer",
    "Trainer.fit": "runtime.trainer:Trainer.fit",
    "optim.adamw": "optim:adamw",
    "optim.sgd": "optim:sgd",
    "losses.cross_entropy": "losses:cross_entropy",
    "RuntimeOptions": "runtime.execution.session:RuntimeOptions",
    "lora": "surgery.adapters:lora",
}


@dataclass(frozen=True)
class Home:
    """The equivalent in gradgraph of an argument of other libraries.

    Attributes:
        words: the names of the argument in other libraries, separated by spaces.
        python: a call such as ``Trainer.fit(epochs=…)``; "" if there is no equivalent.
        shell: an option such as ``--epochs``, perhaps with a value; "" if there is no equivalent.
        instead: advice if there is no equivalent.
    """

    words: str
    python: str = ""
    shell: str = ""
    instead: str = ""

    @property
    def argument(self) -> str:
        """The name of the argument in ``python``; "" if there is none."""
        found = re.search(r"\((\w+)=", self.python)
        return found[1] if found else ""

    def in_python(self, known: Collection[str]) -> str:
        """Return advice to the caller of a function with the arguments ``known``."""
        if self.argument in known:
            return f"did you mean '{self.argument}'?"
        return f"that is gradgraph.{self.python}" if self.python else self.instead

    def in_shell(self) -> str:
        if self.shell:
            return f"that is {self.shell}"
        return self.instead or f"no option does that; in Python it is gradgraph.{self.python}"


def _advice(names: str, instead: str) -> Home:
    """Return a ``Home`` for arguments without an equivalent, with advice ``instead``."""
    return Home(names, instead=instead)


HOMES = (
    # data: Keras' fit, Lightning's fit, Hugging Face's Trainer
    Home("x train_data training_data train_dataset train_dataloader train_dataloaders dataloaders datamodule dataset "
         "generator", "Trainer.fit(data=…)", "--data"),
    Home("labels label y_true", "Trainer.fit(y=…)", "", "labels are part of the data, under the name of the target"),
    Home("validation_data val_data valid_data eval_data dev_data eval_set eval_dataset val_dataset val_dataloader "
         "val_dataloaders val", "Trainer.fit(validation=…)", "--validation"),
    _advice("validation_split validation_fraction",
            "split the data first, and pass the second part as validation"),
    Home("per_device_train_batch_size per_gpu_train_batch_size train_batch_size mini_batch_size bs",
         "Trainer.fit(batch_size=…)", "--batch-size"),
    Home("auto_find_batch_size auto_scale_batch_size", "Trainer.fit(batch_size=\"auto\")", "--batch-size auto"),
    Home("per_device_eval_batch_size per_gpu_eval_batch_size eval_batch_size validation_batch_size",
         "Trainer.evaluate(batch_size=…)", "", "`gradgraph evaluate` takes --batch-size"),
    Home("dataloader_drop_last", "Trainer.fit(drop_last=…)", "--drop-last"),
    Home("class_weight class_weights", "losses.cross_entropy(weight=…)", "--loss-option weight=[1,2]"),
    Home("sample_weights weighted_metrics", "build(sample_weight=…)", "--sample-weight"),
    Home("label_names label_name label_key target_key", "build(target_name=…)", "--target-name"),
    _advice("num_workers workers max_queue_size use_multiprocessing dataloader_num_workers dataloader_pin_memory "
            "dataloader_persistent_workers dataloader_prefetch_factor pin_memory persistent_workers prefetch_factor "
            "use_distributed_sampler reload_dataloaders_every_n_epochs",
            "a background thread reads the next batch while a step runs, so drop it"),
    _advice("tokenizer processing_class data_collator collate_fn remove_unused_columns",
            "gradgraph.text.table(frame, 'tokenizer.json') makes batches of texts, and gradgraph.Padded of any rows"),
    # how long, and when it stops
    Home("max_epochs num_train_epochs num_epochs n_epochs nb_epoch max_iter n_iter", "Trainer.fit(epochs=…)",
         "--epochs"),
    Home("max_iters num_steps num_train_steps total_iterations", "Trainer.fit(max_steps=…)", "--max-steps"),
    Home("fast_dev_run", "Trainer.fit(max_steps=1)", "--dry-run"),
    Home("steps_per_epoch validation_steps limit_train_batches limit_val_batches", "Trainer.fit(limit=…)", "--limit"),
    Home("limit_test_batches limit_predict_batches", "Trainer.evaluate(limit=…)", "",
         "truncate the data first"),
    Home("early_stopping early_stopping_patience early_stopping_rounds n_iter_no_change load_best_model_at_end",
         "Trainer.fit(patience=…)", "--patience"),
    Home("metric_for_best_model", "Trainer.fit(monitor=…)", "--monitor"),
    Home("greater_is_better", "Trainer.fit(mode=…)", "--mode"),
    Home("tol early_stopping_threshold", "Trainer.fit(min_delta=…)", "--min-delta"),
    _advice("min_epochs min_steps max_fun", "a run ends after its epochs, or by its patience, without a minimum"),
    Home("eval_steps val_check_interval eval_interval evaluate_every eval_freq", "Trainer.fit(eval_every=…)",
         "--eval-every"),
    _advice("eval_strategy evaluation_strategy eval_delay eval_on_start validation_freq check_val_every_n_epoch "
            "num_sanity_val_steps do_eval",
            "validation data are evaluated after each epoch, or every so many steps (eval_every, --eval-every)"),
    _advice("do_train do_predict warm_start",
            "gradgraph.Trainer has fit, evaluate and predict, and a second fit goes on"),
    # logging
    Home("verbose show_progress progress_bar progress_bar_refresh_rate enable_progress_bar enable_model_summary "
         "disable_tqdm log_level", "Trainer.fit(progress=…)", "--quiet"),
    Home("logger logging_dir log_dir report_to default_root_dir", "Trainer.fit(log=…)", "--log"),
    Home("log_every_n_steps logging_steps logging_strategy logging_first_step", "Trainer.fit(log_every=…)",
         "--log-every"),
    Home("output_dir save_strategy enable_checkpointing weights_save_path dirpath", "Trainer.fit(checkpoint=…)",
         "--checkpoint"),
    Home("save_steps save_freq every_n_train_steps", "Trainer.fit(checkpoint_every=…)", "",
         "--checkpoint saves after each epoch"),
    Home("save_total_limit save_top_k max_to_keep save_best_only", "CheckpointKeeper(keep=…)", "",
         "--patience keeps the best weights"),
    Home("ckpt_path resume_from_checkpoint initial_epoch ignore_data_skip", "Trainer.resume(path=…)", "--resume"),
    Home("overwrite_output_dir", "Step.save(force=…)", "--force"),
    Home("run_name", "Trainer.fit(checkpoint=…)", "--run"),
    Home("calibrate_probabilities temperature_scaling", "calibrate(data=…)", "",
         "`gradgraph export` takes --calibrate"),
    _advice("push_to_hub hub_model_id hub_strategy hub_token hub_private_repo hub_always_push hub_revision "
            "model_registry", "nothing is uploaded; gradgraph.Trainer.export writes a file to upload"),
    # trial runs
    Home("overfit_batches", "Trainer.overfit(data=…)", "--overfit"),
    Home("auto_lr_find lr_find lr_finder learning_rate_finder", "Trainer.find_lr(data=…)", "--find-lr"),
    Home("profiler", "Trainer.profile(batch=…)", "--profile"),
    Home("detect_anomaly debug", "Trainer.find_nonfinite(batch=…)", "",
         "a nonfinite loss stops the run, and the error names its node"),
    # the machine
    Home("accelerator gpu use_gpu use_cuda no_cuda use_cpu use_mps_device", "Trainer(device=…)", "--device"),
    _advice("gpus devices num_devices num_nodes n_gpu tpu_cores tpu_num_cores strategy local_rank world_size "
            "ddp_backend ddp_timeout ddp_find_unused_parameters fsdp fsdp_config deepspeed sync_batchnorm plugins "
            "accelerator_config parallelism_config distribute ddp_bucket_cap_mb ddp_broadcast_buffers "
            "average_tokens_across_devices",
            "a run is on one device (device, --device), and gradgraph.build(separate=True), or --separate, is for "
            "programs that average gradients over several"),
    Home("random_state random_seed manual_seed data_seed", "Trainer(seed=…)", "--seed"),
    Home("n_jobs num_threads nthread intra_op_num_threads", "RuntimeOptions(threads=…)", "",
         "set the environment variable OMP_NUM_THREADS"),
    Home("full_determinism benchmark", "RuntimeOptions(deterministic=…)", "",
         "runs with the same seed on the same machine are bit for bit equal"),
    _advice("run_eagerly jit_compile steps_per_execution torch_compile torch_compile_backend torch_compile_mode "
            "torchdynamo use_liger_kernel jit_mode_eval use_ipex tf32 torch_empty_cache_steps reduce_overhead",
            "a step is already a graph, which onnxruntime optimizes, so drop it"),
    # loss and metrics
    Home("criterion loss_fn loss_func loss_function compute_loss_func objective", "build(loss=…)", "--loss"),
    Home("loss_weights", "build(loss={\"logits\": (\"mse\", 0.5)})", "--loss OUTPUT=NAME:WEIGHT"),
    Home("label_smoothing_factor", "losses.cross_entropy(label_smoothing=…)", "--loss-option label_smoothing=0.1"),
    Home("compute_metrics eval_metric scoring", "build(metrics=…)", "--metric"),
    Home("loss_input_names", "build(output=…)", "--output"),
    # optimizer and schedule
    Home("optim optimizers optimizer_cls optimizer_cls_and_kwargs solver adafactor", "build(optimizer=…)",
         "--optimizer"),
    Home("optim_args", "optim.adamw(lr=…, weight_decay=…)", "--optimizer-option"),
    Home("lr learning_rate_init base_lr eta0", "Trainer.fit(learning_rate=…)", "--lr"),
    Home("learning_rate", "optim.adamw(lr=…)", "--lr"),
    Home("weight_decay alpha l2", "optim.adamw(weight_decay=…)", "--optimizer-option weight_decay=0.01"),
    Home("adam_beta1 adam_beta2 beta_1 beta_2 beta1 beta2", "optim.adamw(betas=…)",
         "--optimizer-option betas=[0.9,0.99]"),
    Home("adam_epsilon epsilon", "optim.adamw(eps=…)", "--optimizer-option eps=1e-8"),
    Home("momentum", "optim.sgd(momentum=…)", "--optimizer-option momentum=0.9"),
    Home("nesterovs_momentum", "optim.sgd(nesterov=…)", "--optimizer-option nesterov=true"),
    Home("optim_target_modules param_groups", "optim.adamw(groups=…)", "--group"),
    Home("max_grad_norm gradient_clip_val gradient_clip_algorithm clipnorm global_clipnorm grad_clip",
         "optim.clip_by_global_norm(max_norm=…)", "--clip-norm"),
    Home("scheduler lr_scheduler lr_schedule lr_scheduler_type lr_scheduler_kwargs power_t",
         "optim.adamw(lr=gradgraph.optim.cosine(…))", "--schedule cosine"),
    Home("warmup_steps warmup_ratio num_warmup_steps", "optim.warmup(steps=…)",
         "--schedule 'warmup(100, cosine(1e-3, 1000))'"),
    Home("accumulate_grad_batches gradient_accumulation_steps", "Trainer.fit(accumulate=…)", "--accumulate"),
    Home("use_ema ema_momentum ema_decay stochastic_weight_avg average", "build(ema=…)", "--ema"),
    Home("amp use_amp fp16 bf16 fp16_opt_level fp16_full_eval bf16_full_eval half_precision_backend amp_backend "
         "mixed_precision auto_scale_loss", "build(precision=…)", "--precision"),
    Home("adversarial_training adv_training adv_config", "build(adversarial=…)", "--adversarial"),
    Home("gradient_checkpointing gradient_checkpointing_kwargs activation_checkpointing", "build(recompute=…)",
         "--recompute"),
    # weights
    Home("requires_grad trainable params parameters", "build(train=…)", "--train"),
    Home("frozen frozen_params frozen_layers", "build(freeze=…)", "--freeze"),
    Home("artifact_directory", "Step.save(folder=…)", "--out"),
    _advice("hidden_layer_sizes activation", "the model has its layers, and gradgraph.frontend.nn builds new ones"),
    _advice("args training_args config",
            "the settings are arguments of gradgraph.build, of gradgraph.Trainer and of its fit"),
    # adapters: PEFT's LoraConfig
    Home("r lora_r lora_rank", "lora(rank=…)", "--rank"),
    Home("lora_alpha", "lora(alpha=…)", "--alpha"),
    Home("lora_dropout", "lora(dropout=…)", "--dropout"),
    Home("target_modules target_parameters exclude_modules layers_to_transform layers_pattern", "lora(target=…)",
         "--lora"),
    Home("task_type peft_type use_dora use_rslora bias lora_bias", "lora(kind=…)", "--kind"),
    Home("adapter_name", "lora(name=…)", "--name"),
    Home("modules_to_save trainable_token_indices", "build(train=…)", "--train"),
    Home("rank_pattern alpha_pattern", "lora(target=…, rank=…)", "",
         "call `gradgraph surgery` with --lora once for each rank"),
    _advice("init_lora_weights loftq_config eva_config corda_config fan_in_fan_out inference_mode",
            "an adapter starts at zero, and the model determines the layout of its weights, so drop it"),
    # without an equivalent
    Home("custom_op_library", "RuntimeOptions(custom_ops=…)", "--custom-ops"),
    Home("additional_output_names", "Trainer.export(outputs=…)", "", "`gradgraph export` takes --output"),
    Home("model_init", "build(model=…)", "", "the model is a file, whose name is the first word"),
    _advice("ort_format", "`gradgraph export --ort` writes one of a trained model"),
    _advice("weights_only save_only_model save_safetensors save_on_each_node",
            "a checkpoint is a safetensors file, and an export is the model only, so drop it"),
    _advice("include_for_metrics prediction_loss_only preprocess_logits_for_metrics batch_eval_metrics "
            "eval_do_concat_batches eval_accumulation_steps eval_use_gather_object include_num_input_tokens_seen "
            "skip_memory_metrics",
            "metrics are computed in the graph, exactly over all batches, so drop it"),
    _advice("barebones enable_autolog_hparams log_level_replica log_on_each_node logging_nan_inf_filter past_index "
            "prefix restore_callback_states_from_checkpoint group_by_length length_column_name neftune_noise_alpha "
            "nominal_checkpoint liger_kernel_config megatron_config layer_replication",
            "nothing here needs an equivalent, so drop it"),
)  # fmt: skip
RIVALS = {word: home for home in HOMES for word in home.words.split()}


def own_homes(word: str) -> Iterator[Home]:
    """Yield a ``Home`` for each function in ``OWN`` with an argument called ``word``."""
    for name, place in OWN.items():
        module, _, path = place.partition(":")
        found = importlib.import_module(f"gradgraph.{module}")
        for part in path.split("."):
            found = getattr(found, part)
        if word in inspect.signature(found).parameters and word != "self":  # type: ignore[arg-type]
            yield Home(word, f"{name}({word}=…)")


def advice(word: str, known: Collection[str] = ()) -> str | None:
    """Return advice to a caller who passes ``word`` to a function with the arguments ``known``, or None if unknown."""
    homes = [*own_homes(word), *([RIVALS[word]] if word in RIVALS else [])]
    home = next((home for home in homes if home.argument in known), homes[0] if homes else None)
    return None if home is None else home.in_python(known)


def shell_advice(option: str) -> str | None:
    """Return advice about an unknown command-line option such as ``--max-epochs``; None if there is none."""
    home = RIVALS.get(option.strip("-").replace("-", "_").casefold())
    return None if home is None else home.in_shell()
