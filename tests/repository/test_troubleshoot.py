"""Every error has a remedy where it is read, and its class a row on the page of troubleshooting."""

from __future__ import annotations

import re

import pytest

from tests.kit.package_trees import ROOT
from tests.kit.raised_messages import CLASSES, Message, messages

# what only Python has: keyword arguments, calls, our modules
PYTHON = re.compile(
    r"(?<![-\w])[a-z_]+=\S|\bgg\.|gradgraph\.[a-z]|\bnp\.|\.astype|`wrt`|allow_unused|\(\.\.\.\)|\bTrainer\b"
)
OPTION = re.compile(r"(?<![-\w])--[a-z]")
# rooms that no command reaches: networks and losses written in Python, and rules of users
ONLY_PYTHON = (
    "frontend/",
    "export/",
    "gradgraph/explaining/",
    "gradgraph/extend.py",
    "gradgraph/arguments.py",
    "gradgraph/building/loss_function.py",
    "gradgraph/sklearn/",
    "gradgraph/sound/log_mel.py",
    "gradgraph/compat/",
    "gradgraph/data/arrays/padded.py",
)
# sentences that no command can meet, or whose words are ONNX's own
EXCEPTIONS = {
    "gradgraph/passes/normal/": "attributes of operators have such names",
    "gradgraph/rules/": "attributes of operators have such names",
    "gradgraph/building/step_state.py: two parts of the optimizer": "optimizers are chained in Python only",
    "gradgraph/runtime/execution/capture.py: ": "cuda_graph is in Python only",
    "gradgraph/runtime/execution/step_session.py: the loss of '<part>'": "in_place, too",
    "gradgraph/runtime/execution/state.py: the last step failed": "in_place is in Python only",
    "gradgraph/runtime/execution/locking.py: ": "threads are in Python only",
    "gradgraph/data/arrays/batch.py: '<spec>' is text": "a Trainer is what `gradgraph train` uses, too",
    "gradgraph/files/external.py: tensor '": "commands give paths",
    "gradgraph/data/record/data_names.py: the metadata '": "keys of metadata have such names",
    "gradgraph/chat/chat_batches.py: chat data provide tokens": "finetune builds the step itself",
    "gradgraph/building/metric_columns.py: the metric '<column>' returned": "functions are in Python only",
}
# who hands on a sentence that others have made
HAND_ON = {
    "cli/app.py",
    "gradgraph/errors.py",
    "gradgraph/files/models.py",
    "gradgraph/runtime/saved/partial.py",
    "gradgraph/step/step.py",
    "gradgraph/passes/normal/edit.py",
    "gradgraph/passes/normal/validating/consistent.py",
    "gradgraph/runtime/saved/checkpoint.py",
    "gradgraph/runtime/execution/session.py",
    "gradgraph/runtime/features/head.py",
}
PAGE = ROOT / "docs" / "how-to" / "troubleshoot.md"


def is_exception(message: Message) -> bool:
    return any(f"{message.file}: {message.problem}".startswith(e) or message.file.startswith(e) for e in EXCEPTIONS)


@pytest.mark.sweep(0)
def test_every_class_has_a_row_on_the_page_with_words_of_its_messages() -> None:
    table = PAGE.read_text("utf-8").partition("## Error classes\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.+) \| (.+) \|$", table, re.MULTILINE)
    assert sorted(name for name, _, _ in rows) == sorted(CLASSES)
    for name, meaning, _ in rows:
        said = [f"{m.problem}; {m.remedy}" for m in messages() if m.kind == name]
        words = [quoted.strip("… ") for quoted in re.findall('"([^"]+)"', meaning)]
        assert words and [w for w in words if not any(w in text for text in said)] == []


def test_every_message_has_words() -> None:
    assert len(messages()) > 350
    wordless = [m for m in messages() if not re.search("[a-z]{2,}", re.sub("<[^>]*>", "", m.problem))]
    assert {m.file for m in wordless} <= HAND_ON


def test_no_command_gives_python_advice_and_no_call_gives_options() -> None:
    """A remedy that names an argument or a call has another one for the command line, and the other way round."""
    own = [m for m in messages() if not m.file.startswith((*ONLY_PYTHON, "cli/"))]
    reached = [m for m in own if not is_exception(m)]
    in_shell = {m: f"{m.problem}; {m.shell or m.remedy}" for m in reached}
    typed = re.compile(r"in Python \([^)]*\)|--[a-z-]+ '?[a-z]+=\S+")  # and what an option takes
    wrong = [m for m, text in in_shell.items() if PYTHON.search(typed.sub("", text))]
    wrong += [m for m in own if OPTION.search(f"{m.problem}; {m.remedy}")]
    assert wrong == []


def test_exceptions_are_still_needed() -> None:
    assert [e for e in EXCEPTIONS if not any(f"{m.file}: {m.problem}".startswith(e) for m in messages())] == []
