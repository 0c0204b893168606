"""Words and objects of other libraries are answered with their place here, and that place exists."""

from __future__ import annotations

import inspect
import logging
import re
import shlex
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gradgraph as gg
from gradgraph.cli.app import run
from gradgraph.data.augment import AUGMENTATIONS
from gradgraph.errors import GradgraphError
from gradgraph.losses import LOSSES
from gradgraph.metrics import METRICS
from gradgraph.optim.recipes import RECIPES
from gradgraph.optim.schedules import SCHEDULES
from gradgraph.rivals import entries
from gradgraph.rivals.keywords import HOMES, RIVALS, Home, advice, own_homes, shell_advice
from tests.kit.command_line import arrays, mlp
from tests.repository.test_advice import OPTION, OPTIONS

CALL = re.compile(r"([A-Z_a-z.]+)\((\w+)=")
DATA = arrays(32)


def words(text: str) -> list[str]:
    return text.split()


# what these take, in their order; some have more that only subclasses of theirs read
KERAS_COMPILE = words("""
    optimizer loss loss_weights metrics weighted_metrics run_eagerly steps_per_execution jit_compile
    auto_scale_loss""")
KERAS_FIT = words("""
    x y batch_size epochs verbose callbacks validation_split validation_data shuffle class_weight
    sample_weight initial_epoch steps_per_epoch validation_steps validation_batch_size validation_freq""")
LIGHTNING_TRAINER = words("""
    accelerator strategy devices num_nodes precision logger callbacks fast_dev_run max_epochs min_epochs
    max_steps min_steps max_time limit_train_batches limit_val_batches limit_test_batches
    limit_predict_batches overfit_batches val_check_interval check_val_every_n_epoch num_sanity_val_steps
    log_every_n_steps enable_checkpointing enable_progress_bar enable_model_summary accumulate_grad_batches
    gradient_clip_val gradient_clip_algorithm deterministic benchmark inference_mode use_distributed_sampler
    profiler detect_anomaly barebones plugins sync_batchnorm reload_dataloaders_every_n_epochs
    default_root_dir enable_autolog_hparams model_registry""")
LIGHTNING_FIT = words("""
    model train_dataloaders val_dataloaders datamodule ckpt_path weights_only""")
HF_TRAINER = words("""
    model args data_collator train_dataset eval_dataset processing_class model_init compute_loss_func
    compute_metrics callbacks optimizers optimizer_cls_and_kwargs preprocess_logits_for_metrics""")
HF_ARGUMENTS = words("""
    output_dir do_train do_eval do_predict eval_strategy prediction_loss_only per_device_train_batch_size
    per_device_eval_batch_size gradient_accumulation_steps eval_accumulation_steps eval_delay
    torch_empty_cache_steps learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm
    num_train_epochs max_steps lr_scheduler_type lr_scheduler_kwargs warmup_ratio warmup_steps log_level
    log_level_replica log_on_each_node logging_dir logging_strategy logging_first_step logging_steps
    logging_nan_inf_filter save_strategy save_steps save_total_limit save_safetensors save_on_each_node
    save_only_model restore_callback_states_from_checkpoint use_cpu seed data_seed jit_mode_eval bf16 fp16
    fp16_opt_level half_precision_backend bf16_full_eval fp16_full_eval tf32 local_rank ddp_backend debug
    dataloader_drop_last eval_steps dataloader_num_workers dataloader_prefetch_factor past_index run_name
    disable_tqdm remove_unused_columns label_names load_best_model_at_end metric_for_best_model
    greater_is_better ignore_data_skip fsdp fsdp_config deepspeed accelerator_config parallelism_config
    label_smoothing_factor optim optim_args group_by_length length_column_name report_to
    ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers dataloader_pin_memory
    dataloader_persistent_workers skip_memory_metrics push_to_hub resume_from_checkpoint hub_model_id
    hub_strategy hub_token hub_private_repo hub_always_push hub_revision gradient_checkpointing
    gradient_checkpointing_kwargs include_for_metrics eval_do_concat_batches auto_find_batch_size
    full_determinism ddp_timeout torch_compile torch_compile_backend torch_compile_mode
    include_num_input_tokens_seen neftune_noise_alpha optim_target_modules batch_eval_metrics eval_on_start
    use_liger_kernel liger_kernel_config eval_use_gather_object average_tokens_across_devices""")
LORA_CONFIG = words("""
    task_type peft_type inference_mode r target_modules exclude_modules lora_alpha lora_dropout fan_in_fan_out
    bias use_rslora modules_to_save init_lora_weights layers_to_transform layers_pattern rank_pattern
    alpha_pattern megatron_config trainable_token_indices loftq_config eva_config corda_config use_dora
    layer_replication lora_bias target_parameters""")
SKLEARN = words("""
    hidden_layer_sizes activation solver alpha batch_size learning_rate learning_rate_init power_t max_iter
    shuffle random_state tol verbose warm_start momentum nesterovs_momentum early_stopping validation_fraction
    beta_1 beta_2 epsilon n_iter_no_change max_fun n_jobs class_weight""")
ARTIFACTS = words("""
    model requires_grad frozen_params loss optimizer artifact_directory prefix ort_format custom_op_library
    additional_output_names nominal_checkpoint loss_input_names""")

CALLED: dict[str, Callable[..., Any]] = {
    "build": gg.build,
    "Trainer": gg.Trainer,
    "fit": gg.Trainer.fit,
    "lora": gg.lora,
}
ASKED = {
    **{("build", word): "Keras' compile" for word in KERAS_COMPILE},
    **{("build", word): "onnxruntime-training's generate_artifacts" for word in ARTIFACTS},
    **{("fit", word): "Keras' fit" for word in KERAS_FIT},
    **{("fit", word): "Lightning's fit" for word in LIGHTNING_FIT},
    **{("Trainer", word): "Lightning's Trainer" for word in LIGHTNING_TRAINER},
    **{("Trainer", word): "Hugging Face's Trainer" for word in HF_TRAINER + HF_ARGUMENTS},
    **{("fit", word): "scikit-learn's MLPClassifier" for word in SKLEARN},
    **{("lora", word): "PEFT's LoraConfig" for word in LORA_CONFIG},
}
TAKEN = {name: inspect.signature(function).parameters for name, function in CALLED.items()}


@pytest.fixture(scope="module")
def trainer() -> gg.Trainer:
    return gg.Trainer(gg.build(mlp()), device="cpu")


def found_at(path: str) -> Any:
    at: Any = gg
    for part in path.split("."):
        at = getattr(at, part)
    return at


@pytest.mark.sweep(0.404)
@pytest.mark.parametrize(("called", "word"), [key for key in ASKED if key[1] not in TAKEN[key[0]]])
def test_what_users_of_others_type_is_answered(called: str, word: str, trainer: gg.Trainer) -> None:
    given = {"build": (mlp(),), "Trainer": (trainer.definition,), "fit": (trainer, DATA), "lora": (mlp(), "first")}
    with pytest.raises(GradgraphError) as raised:
        CALLED[called](*given[called], **{word: 1})
    said = str(raised.value)
    assert f"'{word}'" in said
    assert "; there is" not in said, "nobody says where it lives"
    for path, argument in CALL.findall(said):
        path = path.removeprefix("gradgraph.")
        if path.partition(".")[0] in ("build", "Trainer", "Step", "lora", "losses", "optim", "RuntimeOptions"):
            assert argument in inspect.signature(found_at(path)).parameters, said
    for name in re.findall(r"did you mean '(\w+)'", said):
        assert name in TAKEN[called]


@pytest.mark.parametrize("home", [home for home in HOMES if home.python], ids=lambda home: home.python)
def test_a_place_in_python_exists(home: Home) -> None:
    assert home.argument
    assert home.argument in inspect.signature(found_at(home.python.partition("(")[0])).parameters


@pytest.mark.parametrize("home", [home for home in HOMES if home.shell], ids=lambda home: home.shell)
def test_a_place_in_the_shell_exists(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    option, *values = shlex.split(home.shell)
    commands = [name for name in ("train", "build", "surgery") if option in OPTIONS[name]]
    assert commands
    if values:  # as it is typed: what is refused is the model, which is not there
        assert run([commands[0], "nowhere.onnx", "--data", "nowhere.npz", option, *values]) == 1
        assert "nowhere" in capsys.readouterr().err


def test_a_row_says_something_in_both_places() -> None:
    words = [word for home in HOMES for word in home.words.split()]
    assert len(words) == len(set(words))
    for home in HOMES:
        assert home.in_python(()) and home.in_shell()
        assert home.shell or home.instead, "what to do in the shell"
    for word in words:
        said = shell_advice(f"--{word.replace('_', '-')}")
        assert said and (word == "lr" or said != f"that is --{word.replace('_', '-')}")


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("train m.onnx --data d.npz --max-epochs 3", "no such option --max-epochs; that is --epochs"),
        ("train m.onnx --data d.npz --learning_rate 3", "that is --lr"),
        ("train m.onnx --data d.npz --gpus 2", "a run is on one device"),
        ("build m.onnx --max-epochs 3", "that is --epochs of `gradgraph train`"),
        ("build m.onnx --epochs 3", "that is one of `gradgraph train`"),
        ("train m.onnx --data d.npz --lora_r 3", "that is --rank of `gradgraph surgery`"),
        ("evaluate step --lr 3", "that is one of `gradgraph train`"),
        ("train m.onnx --data d.npz --batchsize 3", "'--batch-size'"),
    ],
)
def test_in_the_shell(typed: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(typed.split()) == 2
    assert says in " ".join(capsys.readouterr().err.split())


# --- names of entries and methods ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "names"),
    [(LOSSES, entries.LOSSES), (METRICS, entries.METRICS), (RECIPES, entries.OPTIMIZERS),
     (SCHEDULES, entries.SCHEDULES), (AUGMENTATIONS, entries.AUGMENTATIONS)],
    ids=["losses", "metrics", "optimizers", "schedules", "augmentations"],
)  # fmt: skip
def test_an_entry_that_others_call_otherwise_exists(table: Any, names: dict[str, str]) -> None:
    for name, ours in names.items():
        assert name not in table
        assert ours in table or " " in ours
        with pytest.raises(GradgraphError) as raised:
            table.named(name)
        assert ours in str(raised.value)


@pytest.mark.parametrize("name", entries.METHODS)
def test_a_method_of_others_is_answered(name: str, trainer: gg.Trainer) -> None:
    with pytest.raises(AttributeError, match="that is") as raised:
        getattr(trainer, name)
    method, argument = re.findall(r"that is ([\w.]+)\((\w*)", str(raised.value))[0]
    at = gg.build if method == "gradgraph.build" else trainer
    for part in [] if at is gg.build else method.split("."):
        at = getattr(at, part)
    assert not argument or argument in inspect.signature(at).parameters
    assert not hasattr(trainer, "nothing_of_the_kind")


# --- objects ------------------------------------------------------------------------------------------------


def torch_things(module: str, ends: str = "") -> list[str]:
    torch = pytest.importorskip("torch")
    at = torch
    for part in module.split("."):
        at = getattr(at, part)
    return [n for n in dir(at) if n[0].isupper() and n.endswith(ends) and inspect.isclass(getattr(at, n))]


def test_losses_of_torch() -> None:
    """Each is refused; all but those that nobody has here with the name of ours."""
    torch = pytest.importorskip("torch")
    unanswered = set()
    for name in torch_things("nn", "Loss"):
        made = getattr(torch.nn, name)
        needs = [p for p in inspect.signature(made).parameters.values() if p.default is p.empty]
        for given in [made] if needs else [made, made()]:
            with pytest.raises(GradgraphError, match=f"the loss is (a |the class )?{name}") as raised:
                gg.build(mlp(), given)
            if not (found := re.search(r"that is gradgraph\.losses\.(\w+)", str(raised.value))):
                unanswered.add(name)
            else:
                assert found[1] in LOSSES
    assert unanswered <= {
        "AdaptiveLogSoftmaxWithLoss",
        "LinearCrossEntropyLoss",
        "MarginRankingLoss",
        "TripletMarginWithDistanceLoss",
        "NLLLoss2d",
    }


def test_optimizers_and_functions_of_torch() -> None:
    torch = pytest.importorskip("torch")
    weights = [torch.nn.Parameter(torch.zeros(2, 2))]
    unanswered = set()
    for name in torch_things("optim"):
        if name not in ("Optimizer", "SparseAdam"):
            with pytest.raises(GradgraphError, match="the optimizer is") as raised:
                gg.build(mlp(), optimizer=getattr(torch.optim, name)(weights))
            if "that is gradgraph.optim." not in str(raised.value):
                unanswered.add(name)
    assert unanswered <= {"ASGD"}
    with pytest.raises(GradgraphError, match=r"the loss is mse_loss of torch; that is gradgraph\.losses\.mse"):
        gg.build(mlp(), torch.nn.functional.mse_loss)


def foreign(library: str, name: str, base: type = object) -> Any:
    """An object of a class that looks as if it came from ``library``; a subclass of it is the user's own."""
    theirs = type(name, (base,), {"__module__": f"{library}.inner"})
    return type(f"My{name}", (theirs,), {"__module__": "__main__"})()


TABLE = {"train": DATA, "test": DATA}


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: gg.build(foreign("torch", "Module")), "gradgraph.frontend.from_torch(module, example)"),
        (lambda: gg.Trainer(foreign("torch", "Module")), "gradgraph.frontend.from_torch(module, example)"),
        (lambda: gg.vjp(foreign("torch", "Module")), "gradgraph.frontend.from_torch(module, example)"),
        (lambda: gg.build(foreign("keras", "Model")), "model.export('model.onnx', format='onnx')"),
        (lambda: gg.build(foreign("sklearn", "BaseEstimator")), "skl2onnx.to_onnx(estimator, x[:1])"),
        (lambda: gg.Trainer(mlp()), "a ModelProto; it should be a gradgraph.Step, as returned by gradgraph.build"),
        (lambda: gg.build(mlp(), foreign("torch", "Module")), "the loss is a MyModule"),
        (lambda: gg.build(mlp(), metrics=foreign("torchmetrics", "Accuracy")), "the metric is a MyAccuracy"),
        (lambda: gg.build(mlp(), metrics="AUROC"), "did you mean 'roc_auc'"),
        (lambda: fit(TABLE), "not of inputs; pass one split, such as data['train']"),
        (lambda: fit({"x": DATA["x"], "labels": DATA["target"]}),
         "has no input 'labels', and 'target' is missing; rename it, or build the step with target_name='labels'"),
        (lambda: fit({"x": DATA["x"], "y": DATA["target"]}), "target_name='y'"),
        (lambda: fit(DATA, learning_rate=foreign("torch", "LRScheduler")), "gradgraph.optim.cosine(…)"),
        (lambda: fit(x=DATA["x"], y=DATA["target"]), "Trainer.fit has no argument 'x'; did you mean 'data'?"),
        (lambda: gg.optim.adamw(iter([]), lr=1e-3), "adamw got 'lr' twice, by position and by name; its first"),
        (lambda: gg.Trainer(gg.build(mlp()), devices=2), "did you mean 'device'? A run is on one device"),
        (lambda: fit(DATA, lr=0.1), "did you mean 'learning_rate'?"),
    ],
)  # fmt: skip
def test_what_belongs_elsewhere_is_answered(call: Callable[[], Any], says: str) -> None:
    with pytest.raises(GradgraphError) as raised:
        call()
    assert says in str(raised.value)


def fit(*given: Any, **options: Any) -> Any:
    return gg.Trainer(gg.build(mlp()), device="cpu").fit(*given, progress=False, **options)


def test_a_text_column_is_named() -> None:
    pandas = pytest.importorskip("pandas")
    columns = {name: DATA["x"][:, i] for i, name in enumerate("abcd")}
    table = pandas.DataFrame({**columns, "c": ["red"] * 32, "target": DATA["target"]})
    with pytest.raises(
        GradgraphError, match=r"the column 'c' contains .*, not numbers; encode it as numbers, or drop it"
    ):
        fit(table)


def test_labels_by_the_name_of_hugging_face_train_a_step_that_calls_them_so(caplog: pytest.LogCaptureFixture) -> None:
    step = gg.build(mlp(), target_name="labels")
    with caplog.at_level(logging.WARNING):
        history = gg.Trainer(step, device="cpu").fit({"x": DATA["x"], "labels": DATA["target"]}, progress=False)
    assert np.isfinite(history["loss"]).all() and not caplog.messages


def test_own_words_win() -> None:
    assert advice("epochs") == "that is gradgraph.Trainer.fit(epochs=…)"
    assert [home.python for home in own_homes("metrics")] == ["build(metrics=…)"]
    assert advice("no_such_word_anywhere") is None
    assert all(OPTION.match(home.shell) for home in RIVALS.values() if home.shell)
