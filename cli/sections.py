"""The sections of the options of ``build`` and ``train``: groups of their help, and tables of recipes."""

from __future__ import annotations

import click

# the names of options, as parameters; one that stands nowhere here belongs to the training
SECTIONS = {
    "model": ("model", "weights", "train", "freeze", "freeze_below", "output", "target_name", "backend", "opset",
              "precision", "keep_float32", "recompute", "size", "separate"),
    "data": ("data", "validation", "image", "batch_size", "no_shuffle", "drop_last", "sample_weight", "mask",
             "mask_of"),
    "loss": ("loss", "loss_option", "metric", "grad_norm"),
    "optimizer": (
        "optimizer", "lr", "optimizer_option", "group", "no_decay", "layer_decay", "clip_norm", "clip_units", "ema",
        "lookahead", "sam", "sparsity", "sparsity_option", "master_weights",
    ),
    "schedule": ("schedule",),
    "training": ("epochs", "accumulate", "every", "max_steps", "max_time", "limit"),
    "output": ("run_folder", "out", "checkpoint", "export_to", "history", "logs", "log_every", "store", "share_weights",
               "force"),
}  # fmt: skip

# what an option is called in its table of a recipe, where not as on the command line
KEYS = {
    "model": "path",
    "output": "outputs",
    "data": "train",
    "no_shuffle": "shuffle",
    "loss": "name",
    "loss_option": "options",
    "metric": "metrics",
    "optimizer": "name",
    "optimizer_option": "options",
    "group": "groups",
    "schedule": "name",
    "export_to": "export",
    "run_folder": "run",
    "out": "step",
}


def section_of(parameter: click.Parameter) -> str | None:
    """The section of an option or argument; None for those that say how the command talks, which no recipe does."""
    if not parameter.expose_value or parameter.name == "as_json":
        return None
    return next((section for section, names in SECTIONS.items() if parameter.name in names), "training")


def key_of(parameter: click.Parameter) -> str:
    """What it is called in its table of a recipe."""
    return KEYS.get(parameter.name or "", parameter.name or "")


def by_section(command: click.Command, ctx: click.Context) -> dict[str, list[click.Parameter]]:
    """The parameters of a command: sections in their order, then the others under an empty name."""
    parts: dict[str, list[click.Parameter]] = {section: [] for section in (*SECTIONS, "")}
    for parameter in command.get_params(ctx):
        parts[section_of(parameter) or ""].append(parameter)
    for section, names in SECTIONS.items():
        order = {name: i for i, name in enumerate(names)}
        parts[section].sort(key=lambda p: order.get(p.name or "", len(order)))
    return {section: parameters for section, parameters in parts.items() if parameters}
