"""Rows of chat data, whose columns determine their kind, and what is wrong with them."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradgraph.arguments import described
from gradgraph.data.texts.json_rows import Row
from gradgraph.data.texts.records import records_in
from gradgraph.errors import ArgumentError, DataError, listed, shown, suggestion
from gradgraph.files.untrusted.documents import json_of
from gradgraph.files.untrusted.regular import UnreadableError

log = logging.getLogger("gradgraph.chat")

ROLES = ("system", "developer", "user", "assistant", "tool")
VARIABLES = "chat_template_kwargs"  # a column with additional template variables: a dict by name
_OF_TEMPLATES = ("tools", VARIABLES)
_TAKEN = ("messages", "tools", "add_generation_prompt", "given", "self")  # variables that a row may not set
_LABELS = {"true": True, "1": True, "false": False, "0": False}
SHAREGPT = "conversations"  # the column of messages in ShareGPT's format
_SHAREGPT = {"human": "user", "gpt": "assistant", "function_response": "tool", "observation": "tool"}


@dataclass(frozen=True)
class Kind:
    """A format of chat data, identified by its columns.

    Attributes:
        needs: the required columns.
        may: optional columns.
    """

    needs: tuple[str, ...]
    may: tuple[str, ...] = ()


# the kind of data is the first whose required columns are all present
KINDS: dict[str, Kind] = {
    "preference": Kind(("chosen", "rejected"), ("prompt", *_OF_TEMPLATES)),
    "unpaired": Kind(("prompt", "completion", "label"), _OF_TEMPLATES),
    "messages": Kind(("messages",), _OF_TEMPLATES),
    "prompt": Kind(("prompt", "completion"), _OF_TEMPLATES),
    "text": Kind(("text",)),
}


class Rows(Sequence[Row]):
    """Validated rows of one kind.

    Attributes:
        kind: a key of ``KINDS``.
        where: the name of the data in messages.
        place: a function from the index of a row to its place in messages, such as "line 5 of 'chats.jsonl'".
    """

    def __init__(self, kind: str, rows: Sequence[Row], where: str, place: Callable[[int], str]) -> None:
        self.kind, self.where, self.place = kind, where, place
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: Any) -> Any:
        return self._rows[i]

    def taken(self, numbers: Sequence[int]) -> Rows:
        """Return the rows with these indices; messages keep referring to their original places."""
        return Rows(self.kind, [self._rows[i] for i in numbers], self.where, lambda i: self.place(numbers[i]))


def read(source: Any, columns: Mapping[str, str] | None = None, kinds: Sequence[str] = ()) -> Rows:
    """Read chat data and validate every row.

    The columns determine the kind: ``messages``; ``prompt`` and ``completion``; ``text``; ``chosen`` and
    ``rejected`` (with a ``prompt`` or without); ``prompt``, ``completion`` and ``label``. Messages are lists of
    ``{"role": …, "content": …}``; ``conversations`` of ``{"from": …, "value": …}`` are converted. ``prompt``,
    ``completion``, ``chosen`` and ``rejected`` are texts or messages.

    Args:
        source: the path of a ``.jsonl``, ``.json``, ``.csv``, ``.tsv`` or ``.parquet``; a data frame, an Arrow table, a
            Hugging Face dataset, a dict of lists, or a list of dicts.
        columns: your column names, if they differ: ``{"prompt": "question"}``.
        kinds: the kinds to prefer if the data have the columns of several, such as ``("messages",)``.

    Raises:
        ArgumentError: ``columns`` has another column than these.
        DataError: the data cannot be read, lack these columns, or contain an invalid row, which the message names.
    """
    known = dict.fromkeys(name for kind in KINDS.values() for name in (*kind.needs, *kind.may, SHAREGPT))
    if stray := [name for name in columns or () if name not in known]:
        raise ArgumentError(f"chat data have no column '{shown(stray[0])}'{suggestion(stray[0], known)}")
    records = records_in(source)
    raw, where, place = records.rows, records.where, records.place
    if not raw:
        raise DataError(f"{where} has no rows; add at least one")
    renamed = [_renamed(row, columns or {}, i, place) for i, row in enumerate(raw)]
    kind = _kind_of(renamed[0], where, kinds)
    said = dict.fromkeys(name for row in renamed for name, value in row.items() if value is not None)
    unread = [name for name in said if name not in (*KINDS[kind].needs, *KINDS[kind].may)]
    if unread:
        log.warning("columns of %s that are ignored: %s", where, listed(map(shown, unread), 12))
    faults = ((i, fault) for i, row in enumerate(renamed) if (fault := _fault(kind, row)))
    first = next(faults, None)
    if first is not None:
        more = sum(1 for _ in faults)
        also = f" (and {more} more row{'s are' if more > 1 else ' is'} wrong)" if more else ""
        raise DataError(f"{place(first[0])}: {first[1]}{also}")
    return Rows(kind, renamed, where, place)


# --- the content of rows -----------------------------------------------------------------------------------------


def _renamed(row: Row, columns: Mapping[str, str], i: int, place: Callable[[int], str]) -> Row:
    """Return row ``i`` with columns renamed to the names in ``KINDS``, and messages as lists of dicts."""
    for own in columns.values():
        if own not in row:
            raise DataError(f"{place(i)} has no column '{shown(own)}'{suggestion(own, list(row))}")
    used = set(columns.values())
    found = {**{name: value for name, value in row.items() if name not in used},
             **{name: row[own] for name, own in columns.items()}}  # fmt: skip
    if "messages" not in found and SHAREGPT in found:
        found["messages"] = found.pop(SHAREGPT)
    for name in ("messages", "prompt", "completion", "chosen", "rejected", "tools"):
        if name in found:
            found[name] = _messages(_from_text(found[name], name))
    if isinstance(prompt := found.get("prompt"), str) and _repeat(prompt, found.get("chosen"), found.get("rejected")):
        del found["prompt"]
    if isinstance(variables := found.get(VARIABLES), str):
        found[VARIABLES] = _from_text(variables, VARIABLES)
    if isinstance(label := found.get("label"), str):  # from a table whose columns are all text
        found["label"] = _LABELS.get(label.strip().lower(), label)
    return found


def _from_text(value: Any, name: str) -> Any:
    """Parse messages, tools or variables that a table stores as JSON text; return other values unchanged.

    A prompt or an answer is parsed only if it contains messages, since it may be JSON for the model to write.
    """
    may_be_text = name not in ("messages", *_OF_TEMPLATES)
    if not isinstance(value, str) or (may_be_text and not value.startswith("[{")):
        return value
    try:
        found = json_of(value)
    except UnreadableError:
        return value
    return value if may_be_text and not all(map(_is_message, found)) else found


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and ({"from", "value"} <= value.keys() or value.get("role") in ROLES)


def _messages(value: Any) -> Any:
    """Return messages with ``role`` and ``content``, renamed from ``from`` and ``value`` if needed."""
    if not isinstance(value, list) or not all(isinstance(m, Mapping) and "from" in m and "value" in m for m in value):
        return value
    return [
        {"role": _SHAREGPT.get(str(m["from"]), m["from"]), "content": m["value"],
         **{key: item for key, item in m.items() if key not in ("from", "value")}}
        for m in value
    ]  # fmt: skip


def _repeat(prompt: str, chosen: Any, rejected: Any) -> bool:
    """Whether both answers are messages that begin alike, up to the user's message ``prompt``."""
    if not _are_lists(chosen, rejected):
        return False
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))
    last = next(reversed(list(pairs)), (None,))[0]
    return isinstance(last, Mapping) and last.get("role") == "user" and last.get("content") == prompt


def _kind_of(row: Row, where: str, first: Sequence[str]) -> str:
    order = (*first, *KINDS)
    found = next((name for name in order if all(row.get(n) is not None for n in KINDS[name].needs)), None)
    if found is None:
        ways = "; or ".join(" and ".join(f"'{n}'" for n in kind.needs) for kind in KINDS.values())
        raise DataError(
            f"{where} has the columns {listed(row)}, but chat data require {ways}",
            remedy="map your column names: columns={'prompt': 'question', 'completion': 'answer'}",
            shell="map your column names: --column prompt=question --column completion=answer",
        )
    return found


def _fault(kind: str, row: Row) -> str | None:
    """Return a sentence on the fault of a row, or None if it is valid."""
    missing = next((n for n in KINDS[kind].needs if row.get(n) is None), None)
    if missing is not None:
        return f"'{missing}' is missing, but the first row has it; add it, or drop the row"
    variables = row.get(VARIABLES)
    if not (variables is None or (isinstance(variables, Mapping) and all(map(str.isidentifier, variables)))):
        return f"'{VARIABLES}' is {described(variables)}, but should be an object of template variables by name"
    taken = next((name for name in _TAKEN if name in (variables or ())), None)
    if taken is not None:
        return f"'{VARIABLES}' sets '{taken}', which is passed to the chat template in another way; remove it"
    match kind:
        case "messages":
            return fault_of_messages(row["messages"])
        case "text":
            return _fault_of_text("text", row["text"])
        case "preference":
            before = row.get("prompt")
            return _fault_of_answer("chosen", before, row["chosen"]) or _fault_of_answer(
                "rejected", before, row["rejected"]
            )
        case "unpaired" if not isinstance(row["label"], bool) and row["label"] not in (0, 1):
            return f"'label' is {described(row['label'])}; it should be true for a good answer and false for a bad one"
    return _fault_of_answer("completion", row["prompt"], row["completion"])


def _fault_of_answer(name: str, prompt: Any, answer: Any) -> str | None:
    if isinstance(answer, str):
        if prompt is not None and not isinstance(prompt, str):
            return f"'prompt' is {described(prompt)}, but '{name}' is text; use text in both, or messages in both"
        return None if answer.strip() else f"'{name}' is empty; write an answer, or drop the row"
    whole = answer if prompt is None else [*prompt, *answer] if _are_lists(prompt, answer) else None
    if whole is None:
        return f"'{name}' is {described(answer)}; use text in it and in 'prompt', or messages in both"
    fault = fault_of_messages(whole)
    return fault and f"in '{name}', {fault}"


def _are_lists(*values: Any) -> bool:
    return all(isinstance(value, list) for value in values)


def _fault_of_text(name: str, value: Any) -> str | None:
    if not isinstance(value, str):
        return f"'{name}' is {described(value)}, but should be text"
    return None if value.strip() else f"'{name}' is empty; write a text, or drop the row"


def fault_of_messages(messages: Any) -> str | None:
    """Return a sentence on the fault of messages that should end with an answer, or None if they are valid.

    A conversation begins with an optional system message. User and assistant alternate, with tool results in between.
    No answer is empty, and the last message is an answer.
    """
    if not isinstance(messages, list):
        return f"the messages are {described(messages)}, but should be a list of {{'role': …, 'content': …}}"
    if not messages:
        return "the list of messages is empty; add messages, or drop the row"
    before = ""
    for i, message in enumerate(messages, 1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            return f"message {i} has no role; each message is {{'role': …, 'content': …}}"
        role = message["role"]
        if role not in ROLES:
            return f"message {i} has the role '{shown(role)}'{suggestion(role, ROLES)}"
        if role not in _AFTER[before]:
            expected = " or ".join(f"'{r}'" for r in _AFTER[before] if r != "developer")
            follows = f"follows '{before}'" if before else "is the first"
            return f"message {i} of the role '{role}' {follows}, where {expected} is expected; reorder the messages"
        if fault := _fault_of_content(i, message):
            return fault
        if message.get("weight", 1) not in (0, 1, None):
            weight = described(message["weight"])
            return f"message {i} has the weight {weight}; use 1 to train on an answer, and 0 to skip it"
        before = role
    if before != "assistant":
        return f"the last message has the role '{before}', but training requires an assistant's answer; add one"
    return None


_AFTER = {
    "": ("system", "developer", "user"),
    "system": ("user",),
    "developer": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool", "user"),
}


def _fault_of_content(i: int, message: Row) -> str | None:
    content = message.get("content")
    if message["role"] == "assistant" and message.get("tool_calls"):
        return None
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, Mapping) and part.get("type") == "text"]
        if len(texts) < len(content) or not all(isinstance(text, str) for text in texts):
            return f"message {i} contains parts other than text; drop the row"
        content = "".join(map(str, texts))
    if not isinstance(content, str):
        return f"message {i} has the content {described(content)}, but should have text"
    if message["role"] == "assistant" and not content.strip():
        return f"message {i} is an empty answer; write an answer, or drop the row"
    return None
