"""``Run``: all options of a training run; each field is an option in Python, on the command line and in recipes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, fields
from pathlib import Path
from typing import Any, Literal

from gradgraph.arguments import PATH, as_names, meant
from gradgraph.building.option import KINDS, check_options, documented, option, option_of, options, spelled, spellings
from gradgraph.building.step_options import BuildOptions
from gradgraph.errors import ArgumentError, CheckpointError, OutputError, shown
from gradgraph.runs.run_data import Reading
from gradgraph.runs.spelled_build import BUILDING, SPELLINGS
from gradgraph.step.output_paths import check_output

_Path = Any  # accepts a string or ``os.PathLike``; a Run stores a ``Path``

TRIALS = ("dry_run", "find_lr", "overfit", "profile")  # options that write nothing


@documented
@options
class Run:
    """A training run for :func:`gradgraph.train`: its model, data, options and outputs.

    ``gradgraph train`` and its recipes use the same option names. Paths are stored as ``Path``, and a single name for a
    repeatable option as a tuple.

    Raises:
        ArgumentError: an option has an invalid type or value, or options contradict each other.
    """

    model: _Path | None = option(
        "the path of an .onnx file, which is built first, or of a step folder.", PATH.or_none(), default=None
    )
    _: KW_ONLY
    data: _Path = spelled(
        "An .npz (- from stdin) or a folder of .npy, with one array per input; a table (.csv, .parquet, …); a "
        "folder of images, with one subfolder per class; shards (.tar); or images with boxes or masks, as COCO "
        "(.json), YOLO (data.yaml) or Pascal VOC.",
        "data", "path", key="train", required=True,
    )  # fmt: skip
    build: Mapping[str, Any] = option(
        "how to build the model: arguments of ``gradgraph.build``, and options of ``gradgraph build`` by name, such as "
        '``{"loss": "mse", "optimizer": "adamw", "lr": 1e-3, "schedule": "cosine"}``.',
        KINDS["arguments"], default_factory=dict,
    )  # fmt: skip
    start: str | None = spelled(
        'Train this network, such as "mlp", on the columns of a table, in place of a model; --target is required.',
        "model", flags="--model", names=("tables.starting_models:MODELS",), strict=True,
        in_shell="Train this network on the columns of a table, in place of MODEL; --target is required.",
        metavar="NAME", default=None,
    )  # fmt: skip
    validation: _Path | None = spelled("Validation data, evaluated after each epoch.", "data", "path", default=None)
    target: str | Sequence[str] = spelled(
        "Target column(s) of a table; repeatable. Quote a name that contains a comma, as in a .csv. Default: the "
        "column named like the target.",
        "data", "columns", metavar="COLUMN,…", default=(),
    )  # fmt: skip
    preprocess: str | None = spelled(
        '"auto" learns the preprocessing of the columns of --data (scaling, imputation, categories, dates, text), and '
        "makes it part of the exported model. Always on with start.",
        "data", choices=("auto",), default=None, metavar="auto",
        in_shell="Learn the preprocessing of the columns of --data (scaling, imputation, categories, dates, text), and "
        "make it part of the exported model. Always on with --model.",
    )  # fmt: skip
    column: Mapping[str, Any] = spelled(
        "Column kind, if the detected one is wrong, such as zip=category; or with arguments, "
        'notes=\'{"kind": "text", "buckets": 256}\'; repeatable.',
        "data", "kinds", names=("data.preprocess.column_kinds:KINDS",), metavar="NAME=KIND", default={},
    )  # fmt: skip
    image: Mapping[str, Any] = spelled(
        "Image preprocessing, such as mean=[0.5,0.5,0.5], std=…, size=[224,224], shorter=256, resample=bicubic, "
        "layout=NHWC, order=BGR, scale=1; repeatable.",
        "data", "arguments", default={},
    )  # fmt: skip
    tokenizer: _Path | None = spelled(
        "The tokenizer.json for the texts of a table (or of .conll). It is copied next to the trained model, "
        "and found there later.",
        "data", "path", default=None,
    )  # fmt: skip
    text: Mapping[str, Any] = spelled(
        "Text preprocessing, such as text=review, pair=answer, words=tokens, length=128; repeatable.",
        "data", "arguments", default={},
    )  # fmt: skip
    sound: Mapping[str, Any] = spelled(
        "Audio preprocessing of WAV files: rate=16000, seconds=1; repeatable.",
        "data", "arguments", default={},
    )  # fmt: skip
    augment: Any = spelled(
        "Random augmentation of training images or sounds: flip, 'random_resized_crop(scale=[0.5,1])', "
        "'mixup(alpha=0.2)', spec_augment, …; repeatable.",
        "data", "list", names=("data.augment:AUGMENTATIONS",), metavar="NAME", default=(),
    )  # fmt: skip
    epochs: int = spelled("Number of epochs.", "training", "count", default=10)
    batch_size: int | str | None = spelled(
        "Samples per step. Default: 32, or the batch size of a fixed model. auto: the largest power of two that "
        "fits in free memory; auto:4GB: with this memory limit for the process.",
        "data", "batch size", default=None,
    )  # fmt: skip
    accumulate: int | None = spelled(
        "Accumulate gradients over this many batches before each update.", "training", "count", default=None
    )
    keep_features: bool = spelled(
        "Compute frozen layers once for each sample, and train only the rest in each epoch; kept in up to a quarter of "
        "the free memory, otherwise in files next to --checkpoint.",
        "training", "flag", default=False,
    )  # fmt: skip
    feature_variants: int | None = spelled(
        "With keep_features and augment: number of augmented variants of each sample to compute; each epoch trains on "
        "one of them.",
        "training", "count", default=None,
        in_shell="With --keep-features and --augment: number of augmented variants of each sample to compute; each "
        "epoch trains on one of them.",
    )  # fmt: skip
    every: Mapping[str, int] = spelled(
        "For a folder with several steps: train this one only on every N-th batch; repeatable.",
        "training", "arguments", metavar="STEP=N", default={},
    )  # fmt: skip
    run: _Path | None = spelled(
        "Write everything to this folder, with a README.md that explains it: step, checkpoint, trained model, "
        "history, log, and a recipe of all options.",
        "output", "path", metavar="FOLDER", default=None,
    )  # fmt: skip
    out: _Path | None = spelled(
        "Also write the step folder built from MODEL here.",
        "output", "path", flags="-o --out", key="step", default=None,
    )  # fmt: skip
    checkpoint: _Path | None = spelled(
        "Save state and progress here after each epoch and when interrupted.",
        "output", "path", default=None,
    )  # fmt: skip
    weights: _Path | None = spelled(
        "Initialise from the tensors in this .safetensors, .ckpt, .npz or .onnx whose names and shapes match.",
        "model", "path", default=None,
    )  # fmt: skip
    resume: bool = spelled("Resume from --checkpoint.", "training", "flag", default=False)
    export: _Path | None = spelled("Write the trained inference model here.", "output", "path", default=None)
    history: _Path | None = spelled("Write loss and metrics of each epoch here (.csv).", "output", "path", default=None)
    log: _Path | Sequence[_Path] = spelled(
        "Log metrics here during training: .jsonl, .csv, or a folder for TensorBoard; repeatable.",
        "output", "paths", key="logs", default=(),
    )  # fmt: skip
    log_every: int = spelled("Number of steps between records of --log.", "output", "count", default=50)
    max_steps: int | None = spelled(
        "Stop after this many steps. Schedules still span all --epochs, so that a resumed run completes them.",
        "training", "count", default=None,
    )  # fmt: skip
    max_time: float | None = spelled("Stop after this time.", "training", "seconds", metavar="SECONDS", default=None)
    limit: int | None = spelled("Use only this many batches of each epoch.", "training", "count", default=None)
    patience: int | None = spelled(
        "Early stopping: stop after this many epochs (or --eval-every intervals) without improvement, and keep the "
        "best weights.",
        "training", "count", default=None,
    )  # fmt: skip
    eval_every: int | None = spelled(
        "Evaluate --validation every N steps instead of after each epoch; --patience and checkpoints follow.",
        "training", "count", metavar="STEPS", default=None,
    )  # fmt: skip
    monitor: str | None = spelled(
        "Column that --patience monitors, such as val_accuracy. Default: val_loss.",
        "training", metavar="COLUMN", default=None,
    )  # fmt: skip
    mode: Literal["min", "max"] | None = spelled(
        "Whether lower or higher is better. Default: derived from the column's name.",
        "training", choices=("min", "max"), default=None,
    )  # fmt: skip
    min_delta: float = spelled(
        "Minimum change that counts as an improvement.", "training", "share", shows=False, default=0.0
    )
    shuffle: bool = spelled(
        "Whether to shuffle the samples.", "data", "flag", name="no_shuffle", key="shuffle",
        in_shell="Do not shuffle the samples.", default=True,
    )  # fmt: skip
    drop_last: bool = spelled("Drop the last batch of an epoch if it is smaller.", "data", "flag", default=False)
    device: Literal["auto", "cpu", "cuda"] = spelled(
        "Where to train.", "training", choices=("auto", "cpu", "cuda"), default="auto"
    )
    native_kernels: bool | None = spelled(
        "Require native C++ kernels, or with --no-native-kernels disable them. Default: use them on the CPU if they "
        "are built (see `gradgraph env`).",
        "training", "flag", default=None,
    )  # fmt: skip
    matmul_precision: Literal["highest", "high"] = spelled(
        "Native kernels: full float32 precision, or faster with errors of at most 2^-15 (on processors with AMX).",
        "training", choices=("highest", "high"), default="highest",
    )  # fmt: skip
    ranks: int | None = spelled(
        "Train in this many processes on this machine, each on a part of every batch (on several machines: mpiexec "
        "-n 64 gradgraph train …).",
        "training", "count", default=None,
    )  # fmt: skip
    rank_timeout: float = spelled(
        "Stop the run if a process does not respond for this long.",
        "training", "seconds", metavar="SECONDS", default=600.0,
    )  # fmt: skip
    shard_state: bool = spelled(
        "With several processes: partition the optimizer state among them.", "training", "flag", default=False
    )
    sync_batch_norm: bool = spelled(
        "With several processes: compute batch statistics over the whole batch, as one process would.",
        "training", "flag", default=False,
    )  # fmt: skip
    compress: str | None = spelled(
        "With several processes: compress gradients, such as top_k(ratio=0.01).",
        "training", names=("parallel.data_parallel:COMPRESSIONS",), default=None,
    )  # fmt: skip
    dry_run: bool = spelled(
        "Train, evaluate, save and export one batch as a test; write nothing.",
        "training", "flag", default=False,
    )  # fmt: skip
    find_lr: bool = spelled(
        "Compare learning rates on the data, suggest one, and exit; write nothing.",
        "training", "flag", default=False,
    )  # fmt: skip
    overfit: bool = spelled(
        "Try to overfit one batch in 200 steps, report the result, and exit; write nothing.",
        "training", "flag", default=False,
    )  # fmt: skip
    profile: bool = spelled(
        "Profile the operators of a step by layer, and exit; write nothing.", "training", "flag", default=False
    )
    seed: int = spelled(
        "Random seed. With a step folder, it only affects the order of data: masks keep the seed of the build.",
        "training", "whole", span=(0, (1 << 63) - 1), default=0,
    )  # fmt: skip
    share_weights: bool = spelled(
        "Refer to the model's external data by relative path and digest instead of copying large weights.",
        "output", "flag", default=False,
    )  # fmt: skip
    force: bool = spelled("Overwrite the output of an earlier run.", "output", "flag", default=False)

    def __post_init__(self) -> None:
        for f in fields(self):
            object.__setattr__(self, f.name, _settled(f.name, getattr(self, f.name)))
        check_options(self)
        self._check_build()
        self._check_combinations()

    def _check_build(self) -> None:
        known = {*SPELLINGS, *(f.name for f in fields(BuildOptions))} - {"model", "seed", "accumulate"}
        for name in self.build:
            if name in ("seed", "accumulate"):
                raise ArgumentError(f"{name} is an option of the run; pass {name}= to Run instead of in build")
            if name not in known:
                raise ArgumentError(f"build has no option '{shown(name)}'{meant(str(name), sorted(known))}")

    def _check_combinations(self) -> None:
        """Raise ArgumentError for options that contradict each other."""
        if (self.model is None) == (self.start is None):
            raise ArgumentError.of_options(
                "give MODEL, such as model.onnx, or --model NAME to train a new network on a table",
                "pass model, such as 'model.onnx', or start, the name of a new network for a table",
            )
        if self.start is not None and not self.target:
            raise ArgumentError.of_options(
                f"--model {self.start} predicts a column of the table; name it with --target COLUMN",
                f"start='{self.start}' predicts a column of the table; name it with target=",
            )
        contradictions = {
            "--run saves the results of a run, but a trial has none; give one of them": (
                self.run is not None and self.is_trial
            ),
            "--resume needs --checkpoint, the file to resume from; add it": (
                self.resume and self.checkpoint is None and self.run is None
            ),
            "--resume continues from the checkpoint and --force overwrites it; give one of them": (
                self.resume and self.force
            ),
            "--resume uses the weights of the checkpoint; omit --weights": self.resume and self.weights is not None,
            "--matmul-precision applies to native kernels; omit --no-native-kernels": (
                self.matmul_precision != "highest" and self.native_kernels is False
            ),
            "--column requires --preprocess auto or --model; add --preprocess auto": bool(
                self.column and self.preprocess is None and self.start is None
            ),
        }
        for message, contradicts in contradictions.items():
            if contradicts:
                raise ArgumentError.of_options(message)
        foreign = [name for name in self.build if name in BUILDING] + ["out"] * (self.out is not None)
        if self.trains_step and foreign:
            raise ArgumentError.of_options(
                f"--{foreign[0].replace('_', '-')} is a build option, but '{shown(self.model)}' is a step folder, "
                "which is already built; omit it"
            )

    @property
    def reading(self) -> Reading:
        """The options for reading data files."""
        return Reading(self.image, self.tokenizer, self.text, self.sound, self.model)

    @property
    def trains_step(self) -> bool:
        """Whether the model is a step folder."""
        return self.model is not None and bool(self.model.is_dir())

    @property
    def is_trial(self) -> bool:
        """Whether the run is a trial that writes nothing, such as a dry run."""
        return any(getattr(self, trial) for trial in TRIALS)

    @property
    def begun(self) -> Path | None:
        """The step folder of a resumed run of a starting model; None for any other run."""
        return self.out if self.model is None and self.resume and self.out is not None and self.out.is_dir() else None

    def check_outputs(self) -> None:
        """Raise an error, before training begins, if an output cannot be written.

        Raises:
            OutputError: an output path is invalid, is an input file, or is used twice.
            CheckpointError: the checkpoint exists although neither ``resume`` nor ``force`` is set, or there is none to
                resume from.
        """
        inputs = [p for p in (self.model, self.data, self.validation, self.weights) if p is not None]
        outputs = [("--checkpoint", self.checkpoint), ("--export", self.export), ("--history", self.history)]
        outputs += [("--log", path) for path in self.log if path.suffix]  # a TensorBoard folder may exist
        taken: dict[Path, str] = {}
        for name, path in outputs:
            check_output(path, *inputs)
            if path is None:
                continue
            other = taken.get(path.resolve())
            taken[path.resolve()] = name
            if other is not None:
                raise OutputError.of_options(f"{other} and {name} are both '{shown(path)}'; give each its own path")
        if self.checkpoint is None or self.is_trial:
            return
        there = self.checkpoint.exists()
        if there and not (self.resume or self.force):
            raise CheckpointError.of_options(
                f"'{shown(self.checkpoint)}' already exists; add --resume to resume from it, or --force to start over"
            )
        if self.resume and not there:
            raise CheckpointError.of_options(
                f"there is no checkpoint '{shown(self.checkpoint)}' to resume from; omit --resume"
            )

    def total_steps(self) -> int | None:
        """Return the number of updates in all epochs, for schedules; None if it is unknown.

        It is unknown if the batch size is not a number or the data do not exist. ``max_steps`` does not reduce it, so
        that a resumed run continues the same schedule.
        """
        if not isinstance(self.batch_size, int) or not self.data.exists():
            return None
        from gradgraph.data.sources.sources import Order

        steps = Order(self.batch_size, drop_last=self.drop_last).batch_count(self.reading.rows(self.data))
        steps = steps if self.limit is None else min(steps, self.limit)
        every = self.accumulate or 1
        return self.epochs * -(-steps // every)  # schedules count updates


OPTIONS = spellings(Run)
_TAKES = {f.name: one.shell[0].takes for f in fields(Run) if (one := option_of(f)) is not None and one.shell}


def run_of(model: Path | None, values: Mapping[str, Any]) -> Run:
    """Return the run of a model with these values of command-line options, by parameter name."""
    shells = {name: shell for name, shell in OPTIONS.items() if name in values}
    own: dict[str, Any] = {s.field: not values[name] if s.is_opposite else values[name] for name, s in shells.items()}
    return Run(model, build={name: value for name, value in values.items() if name not in OPTIONS}, **own)


def _settled(name: str, value: Any) -> Any:
    """Return the value of an option as a ``Run`` stores it: paths as ``Path``, and several values as a tuple."""
    takes = "path" if name == "model" else _TAKES.get(name)
    if takes in ("path", "paths", "columns") and not KINDS[takes].fits(value):
        return value  # which the check of the options refuses
    if takes == "path":
        return Path(value)
    if takes == "paths":
        return tuple(map(Path, [value] if PATH.fits(value) else value))
    if takes == "columns":
        return tuple(as_names(value))
    if takes == "list":
        return (value,) if isinstance(value, str) else tuple(value)
    return value
