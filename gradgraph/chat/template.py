"""Chat templates: a conversation as one text, and which parts of it the assistant says.

A model's folder brings its template, in Jinja (``chat_template.jinja``, or ``chat_template`` of
``tokenizer_config.json``). Anybody may have written it, so that it runs in a process of its own
(``files.untrusted.jinja_worker``), with the filters and functions that Hugging Face's ``apply_chat_template`` gives it,
and gives the same text.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from gradgraph.errors import DataError, listed, shown
from gradgraph.files.untrusted.contained_paths import bytes_inside, is_inside
from gradgraph.files.untrusted.documents import json_of
from gradgraph.files.untrusted.jinja_worker import BEGIN as _BEGIN
from gradgraph.files.untrusted.jinja_worker import END as _END
from gradgraph.files.untrusted.jinja_worker import TemplateError, is_installed, of_this_process
from gradgraph.files.untrusted.regular import UnreadableError, regular_bytes

FILE, CONFIG, MAP = "chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json"
LARGEST = 1 << 20  # bytes of a template
TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_GREEDY = ("time", "memory", "long", "end", "recursion")
_PROBE = "a part of a text"
REASONING = ("reasoning_content", "thinking", "reasoning")

Message = Mapping[str, Any]
Span = tuple[int, int]


class MissingTemplateError(DataError):
    """A folder has no chat template, which is another thing than a broken one."""


@dataclass(frozen=True)
class Rendered:
    """A conversation as text.

    Attributes:
        text: of the whole conversation.
        answers: the first character of each answer, and the one behind its end.
    """

    text: str
    answers: tuple[Span, ...] = ()


class ChatTemplate:
    """A chat template, which makes one text of messages.

    Args:
        source: in Jinja.
        tokens: the special tokens that it may name, such as ``{"eos_token": "</s>"}``.
        where: what messages call it.
        now: the time that it may write; None: that of each rendering.

    Raises:
        DataError: it is no Jinja, or the package jinja2 is not installed.
    """

    def __init__(
        self,
        source: str,
        tokens: Mapping[str, str] | None = None,
        where: str = "the chat template",
        now: datetime | None = None,
    ) -> None:
        self.source, self.tokens, self.where = source, dict(tokens or {}), where
        self._now = now
        if not is_installed():
            install = "pip install jinja2"
            raise DataError(
                "chat templates are read by the package jinja2, which is not installed", remedy=install, shell=install
            )
        try:
            of_this_process().check(source, now)
        except TemplateError as fault:
            if fault.kind in _GREEDY:
                raise self._refused(fault) from None
            raise DataError(f"{where} is no Jinja template ({fault}); give another one") from None

    @classmethod
    def of(
        cls,
        folder: str | os.PathLike[str],
        file: str | os.PathLike[str] | None = None,
        now: datetime | None = None,
    ) -> ChatTemplate:
        """The template of a folder, or of another file with the special tokens of the folder.

        Raises:
            MissingTemplateError: there is none.
            DataError: it cannot be read.
        """
        config = table_in(Path(folder), CONFIG)
        tokens = special_tokens(Path(folder))
        own = Path(folder) / FILE if file is None else Path(file)
        if file is not None or is_inside(folder, FILE):
            return cls(_text(own, file is None), tokens, f"the chat template '{shown(own)}'", now)
        source = config.get("chat_template")
        if isinstance(source, list):  # several, by name
            named = {str(t.get("name")): t.get("template") for t in source if isinstance(t, Mapping)}
            source = named.get("default")
            if source is None:
                raise DataError(
                    f"'{shown(Path(folder) / CONFIG)}' has the chat templates {listed(named)}, and none is the "
                    "'default'",
                    remedy="write the one you mean to a file, and give template=FILE",
                    shell="write the one you mean to a file, and give --template FILE",
                )
        if not isinstance(source, str):
            raise MissingTemplateError(
                f"the folder '{shown(folder)}' has no chat template: neither {FILE} nor 'chat_template' in {CONFIG}",
                remedy="give template=FILE, or template='none' for prompt, completion and text as they stand",
                shell="give --template FILE, or --template none for prompt, completion and text as they stand",
            )
        return cls(source, tokens, f"the chat template of '{shown(folder)}'", now)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        **more: Any,
    ) -> str:
        """The text of messages, as ``apply_chat_template(messages, tokenize=False)`` of Hugging Face gives it.

        Args:
            messages: ``{"role": …, "content": …}`` each.
            tools: JSON schemas of functions that the model may call.
            add_generation_prompt: end where the assistant is to speak.
            more: other variables of the template, such as ``enable_thinking=False``.

        Raises:
            DataError: the template refuses the messages, or fails.
        """
        (text,) = self._rendered([(messages, add_generation_prompt)], tools, more)
        return _without_marks(text)[0]

    def with_answers(
        self,
        messages: Sequence[Message],
        *,
        given: int = 0,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **more: Any,
    ) -> Rendered:
        """The text of messages, and where in it the assistant says what is learnt.

        A template says that by ``{% generation %}``. Of one that does not, the text up to an answer and the text up to
        its end are rendered, and must be beginnings of the whole.

        Args:
            messages: as for :meth:`render`; an answer of the ``weight`` 0 is not learnt.
            given: how many messages are a prompt, whose answers are not learnt.
            tools, more: as for :meth:`render`.

        Raises:
            DataError: the template refuses the messages; or the text up to an answer is no beginning of the whole.
        """
        said = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        learnt = [i for i in said if i >= given and messages[i].get("weight") != 0]
        parts = (
            []
            if self.marks_answers
            else [p for i in learnt for p in ((messages[:i], True), (messages[: i + 1], False))]
        )
        whole, *texts = self._rendered([(messages, False), *parts], tools, more)
        text, marked = _without_marks(whole)
        if not self.marks_answers:
            pairs = zip(learnt, texts[::2], texts[1::2], strict=True)
            return Rendered(text, tuple(self._span(i, before, behind, text) for i, before, behind in pairs))
        if len(learnt) < len(said):
            if len(marked) != len(said):
                raise DataError(
                    f"{self.where} marks {len(marked)} answers of {len(said)}, so that it cannot be said which of them "
                    "are not learnt; mark each answer by {% generation %} once"
                )
            marked = [span for i, span in zip(said, marked, strict=True) if i in learnt]
        return Rendered(text, tuple((begin, end) for begin, end in marked if begin < end))

    @cached_property
    def marks_answers(self) -> bool:
        """Whether it says by ``{% generation %}`` what the assistant speaks."""
        return bool(_GENERATION.search(self.source))

    @cached_property
    def _reads_parts(self) -> bool:
        """Whether it takes texts out of lists of parts; others would write such a list as Python does."""
        parts = [{"type": "text", "text": _PROBE}]
        try:
            (text,) = self._run([{"messages": [{"role": "user", "content": parts}], **self.tokens}])
        except TemplateError as fault:
            if fault.kind in _GREEDY:
                raise self._refused(fault) from None
            return False
        return _PROBE in text and repr(_PROBE) not in text

    def _span(self, i: int, before: str, behind: str, text: str) -> Span:
        """Where the answer that is message ``i`` stands in the text of all messages.

        Args:
            before, behind: the texts up to the answer, and up to its end.
        """
        if not text.startswith(behind):  # some end every text with a token that says so
            behind = behind.removesuffix(self.tokens.get("eos_token") or "")
        if not (behind.startswith(before) and text.startswith(behind)):
            raise DataError(
                f"{self.where} changes what stands before the answer in message {i + 1} once more follows, so that it "
                "cannot be said where answers begin and end",
                remedy="mark them by {% generation %} and {% endgeneration %} in a template of your own, "
                "template=FILE, or make rows of one answer each",
                shell="mark them by {% generation %} and {% endgeneration %} in a template of your own, "
                "--template FILE, or make rows of one answer each",
            )
        return len(before), len(behind)

    def _rendered(
        self, parts: Sequence[tuple[Sequence[Message], bool]], tools: Any, more: Mapping[str, Any]
    ) -> list[str]:
        """The texts that the template writes, with marks around what it calls generation.

        Args:
            parts: messages, and whether they end where the assistant is to speak; the first are the longest.
        """
        whole = self._taken(parts[0][0])
        variables = {**self.tokens, "documents": None, **_plain(more), "tools": _plain(tools)}
        try:
            return self._run([{**variables, "messages": whole[: len(messages)], "add_generation_prompt": prompt}
                              for messages, prompt in parts])  # fmt: skip
        except TemplateError as fault:
            raise self._refused(fault) from None

    def _taken(self, messages: Sequence[Message]) -> list[Any]:
        """Messages as the template is given them."""
        plain = [_with_reasoning(_plain(message)) for message in messages]
        if any(isinstance(message.get("content"), list) for message in plain) and not self._reads_parts:
            plain = [{**message, "content": _joined(message.get("content"))} for message in plain]
        written = json.dumps(plain, ensure_ascii=False)
        if _BEGIN in written or _END in written:
            raise DataError("the messages hold U+FDD0 or U+FDD1, which are no characters; remove them")
        return plain

    def _run(self, variables: Sequence[Mapping[str, Any]]) -> list[str]:
        return of_this_process().render(self.source, self._now, variables)

    def _refused(self, fault: TemplateError) -> DataError:
        """The error for a template that gives no text."""
        if fault.kind == "security":
            return DataError(f"{self.where} does what Jinja's sandbox forbids ({fault}); give another one")
        if fault.kind in _GREEDY:
            return DataError(f"{self.where} is ended: {fault}; give another one")
        return DataError(f"{self.where} refuses the messages ({fault}); write them as it expects")


# --- what a template is given -------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    """A value as a template sees it: plain JSON, so that it finds no methods on it."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    for kind in (str, bool, int, float):
        if isinstance(value, kind):
            return kind(value)
    return f"<{type(value).__name__}>"


def _joined(content: Any) -> Any:
    """A list of parts of text as one text."""
    if not isinstance(content, list):
        return content
    return "".join(str(part.get("text", "")) if isinstance(part, dict) else str(part) for part in content)


def _with_reasoning(message: Any) -> Any:
    """A message whose reasoning has every name that templates read it by, as Hugging Face gives it."""
    found = next((message[name] for name in REASONING if message.get(name) is not None), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}


def _without_marks(marked: str) -> tuple[str, list[Span]]:
    """The text, and the spans that stand between marks, empty ones too."""
    parts, answers, at = [], list[Span](), 0
    for piece in re.split(f"({_BEGIN}[^{_END}]*{_END})", marked):
        is_answer = piece.startswith(_BEGIN)
        text = piece.replace(_BEGIN, "").replace(_END, "")
        if is_answer:
            answers.append((at, at + len(text)))
        parts.append(text)
        at += len(text)
    return "".join(parts), answers


# --- files of a folder -------------------------------------------------------------------------------------------


def special_tokens(folder: Path) -> dict[str, str]:
    """The special tokens that a folder names, such as ``{"eos_token": "</s>"}``; empty where it names none."""
    found = dict[str, str]()
    for source in (table_in(folder, CONFIG), table_in(folder, MAP)):
        for name in TOKENS:
            value = source.get(name)
            value = value.get("content") if isinstance(value, Mapping) else value
            if isinstance(value, str):
                found.setdefault(name, value)
    return found


def table_in(folder: Path, name: str) -> Mapping[str, Any]:
    """A file of JSON of a folder; empty where there is none.

    Raises:
        DataError: it cannot be read, or leads out of the folder.
    """
    try:
        content = bytes_inside(folder, name)
        value = None if content is None else json_of(content)
    except UnreadableError as error:
        raise DataError(
            f"'{shown(folder / name)}' cannot be read ({error}); take it from where the model comes from"
        ) from None
    return value if isinstance(value, Mapping) else {}


def _text(path: Path, inside: bool) -> str:
    """The content of a template: of a folder, or of the file that a user gave."""
    try:
        content = bytes_inside(path.parent, path.name, LARGEST) if inside else None
        return (regular_bytes(path, LARGEST) if content is None else content).decode("utf-8")
    except UnreadableError as error:
        raise DataError(f"the chat template '{shown(path)}' cannot be read ({error}); check the path") from None
    except UnicodeDecodeError:
        raise DataError(f"the chat template '{shown(path)}' is no text in UTF-8; save it as such") from None
