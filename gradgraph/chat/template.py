"""Chat templates: format a conversation as text, and locate the assistant's answers in it.

A model folder contains its template in Jinja (``chat_template.jinja``, or ``chat_template`` of
``tokenizer_config.json``). It is untrusted and therefore rendered in a separate process
(``files.untrusted.jinja_worker``), with the filters and functions of Hugging Face's ``apply_chat_template``, and with
the same result.
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

from gradgraph.data.texts.tokenizer_files import CONFIG, special_tokens, table_in
from gradgraph.errors import DataError, listed, shown
from gradgraph.files.untrusted.contained_paths import bytes_inside, is_inside
from gradgraph.files.untrusted.jinja_worker import BEGIN as _BEGIN
from gradgraph.files.untrusted.jinja_worker import END as _END
from gradgraph.files.untrusted.jinja_worker import TemplateError, is_installed, of_this_process
from gradgraph.files.untrusted.regular import UnreadableError, regular_bytes

FILE, FURTHER = "chat_template.jinja", "additional_chat_templates"  # a folder
DEFAULT, OF_TOOLS = "default", "tool_use"  # names of templates: for messages, and for those with tools
LARGEST = 1 << 20  # bytes of a template
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_GREEDY = ("time", "memory", "long", "end", "recursion")  # kinds of faults: the template exceeded a limit
_PROBE = "a part of a text"
REASONING = ("reasoning_content", "thinking", "reasoning")

Message = Mapping[str, Any]
Span = tuple[int, int]


class MissingTemplateError(DataError):
    """Raised if a folder has no chat template; an invalid template raises DataError."""


@dataclass(frozen=True)
class Rendered:
    """A formatted conversation.

    Attributes:
        text: the text of the whole conversation.
        answers: start and end of each answer, in characters.
    """

    text: str
    answers: tuple[Span, ...] = ()


class ChatTemplate:
    """A chat template, which formats messages as text.

    Args:
        source: the template in Jinja.
        tokens: the special tokens that the template may refer to, such as ``{"eos_token": "</s>"}``.
        where: the template's name in messages.
        now: the time that the template may insert; None for the current time.

    Raises:
        DataError: the source is not valid Jinja, or the package jinja2 is not installed.
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
        self._of_tools: ChatTemplate | None = None  # the folder's template for messages with tools, if it has another
        if not is_installed():
            install = "pip install jinja2"
            raise DataError(
                "chat templates require the package jinja2, which is not installed", remedy=install, shell=install
            )
        try:
            of_this_process().check(source, now)
        except TemplateError as fault:
            if fault.kind in _GREEDY:
                raise self._refused(fault) from None
            raise DataError(f"{where} is not a valid Jinja template ({fault}); choose another one") from None

    @classmethod
    def of(
        cls,
        folder: str | os.PathLike[str],
        file: str | os.PathLike[str] | None = None,
        now: datetime | None = None,
    ) -> ChatTemplate:
        """Load the template of a folder, or another file with the special tokens of the folder.

        Raises:
            MissingTemplateError: the folder has no template.
            DataError: the template or a configuration file cannot be read.
        """
        folder, tokens = Path(folder), special_tokens(Path(folder))
        if file is not None:
            return cls(_text(Path(file), None), tokens, f"the chat template '{shown(file)}'", now)
        named, where = _templates_in(folder)
        if not named:
            raise MissingTemplateError(
                f"the folder '{shown(folder)}' has no chat template: neither {FILE} nor 'chat_template' in {CONFIG}",
                remedy="pass template=FILE, or template='none' to use prompt, completion and text verbatim",
                shell="add --template FILE, or --template none to use prompt, completion and text verbatim",
            )
        if DEFAULT not in named:
            raise DataError(
                f"'{shown(folder / CONFIG)}' has the chat templates {listed(named)}, but none is named '{DEFAULT}'",
                remedy="write one of them to a file, and pass template=FILE",
                shell="write one of them to a file, and pass --template FILE",
            )
        made = cls(named[DEFAULT], tokens, where, now)
        if OF_TOOLS in named:
            made._of_tools = cls(named[OF_TOOLS], tokens, f"{where}, '{OF_TOOLS}',", now)
        return made

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        **more: Any,
    ) -> str:
        """Format messages, like Hugging Face's ``apply_chat_template(messages, tokenize=False)``.

        Args:
            messages: ``{"role": …, "content": …}`` each.
            tools: JSON schemas of functions that the model may call.
            add_generation_prompt: end where the assistant's answer begins.
            more: other template variables, such as ``enable_thinking=False``.

        Raises:
            DataError: the template rejects the messages, or fails.
        """
        used = self if tools is None or self._of_tools is None else self._of_tools
        (text,) = used._rendered([(messages, add_generation_prompt)], tools, more)
        return _without_marks(text)[0]

    def with_answers(
        self,
        messages: Sequence[Message],
        *,
        given: int = 0,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **more: Any,
    ) -> Rendered:
        """Format messages, and locate the answers to train on.

        A template may mark answers with ``{% generation %}``. Otherwise, the conversation is also rendered up to the
        beginning and up to the end of each answer, and these texts must be prefixes of the whole text.

        Args:
            messages: as for :meth:`render`; an answer of ``weight`` 0 is not trained on.
            given: the number of leading messages that form the prompt, whose answers are not trained on.
            tools, more: as for :meth:`render`.

        Raises:
            DataError: the template rejects the messages; or the text up to an answer is not a prefix of the whole.
        """
        if tools is not None and self._of_tools is not None:
            return self._of_tools.with_answers(messages, given=given, tools=tools, **more)
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
                    f"{self.where} marks {len(marked)} of {len(said)} answers, so it is unclear which of them to "
                    f"exclude; mark each answer with {{% generation %}} once"
                )
            marked = [span for i, span in zip(said, marked, strict=True) if i in learnt]
        return Rendered(text, tuple((begin, end) for begin, end in marked if begin < end))

    @cached_property
    def marks_answers(self) -> bool:
        """Whether the template marks the assistant's answers with ``{% generation %}``."""
        return bool(_GENERATION.search(self.source))

    @cached_property
    def _reads_parts(self) -> bool:
        """Whether the template supports content that is a list of parts; other templates would print the list."""
        parts = [{"type": "text", "text": _PROBE}]
        try:
            (text,) = self._run([{"messages": [{"role": "user", "content": parts}], **self.tokens}])
        except TemplateError as fault:
            if fault.kind in _GREEDY:
                raise self._refused(fault) from None
            return False
        return _PROBE in text and repr(_PROBE) not in text

    def _span(self, i: int, before: str, behind: str, text: str) -> Span:
        """Return the span of the answer in message ``i``: between ``before`` and ``behind``, prefixes of ``text``."""
        if not text.startswith(behind):  # some templates end every text with an end token
            behind = behind.removesuffix(self.tokens.get("eos_token") or "")
        if not (behind.startswith(before) and text.startswith(behind)):
            raise DataError(
                f"{self.where} changes the text before the answer in message {i + 1} if more messages follow, so the "
                "answers cannot be located",
                remedy="mark them with {% generation %} and {% endgeneration %} in your own template, template=FILE, "
                "or split rows into one answer each",
                shell="mark them with {% generation %} and {% endgeneration %} in your own template, --template "
                "FILE, or split rows into one answer each",
            )
        return len(before), len(behind)

    def _rendered(
        self, parts: Sequence[tuple[Sequence[Message], bool]], tools: Any, more: Mapping[str, Any]
    ) -> list[str]:
        """Return the texts of ``parts``, with marks around generation blocks.

        Each part is the first messages of the first part, and whether to end where the assistant's answer begins.
        """
        whole = self._taken(parts[0][0])
        variables = {**self.tokens, "documents": None, **_plain(more), "tools": _plain(tools)}
        try:
            return self._run([{**variables, "messages": whole[: len(messages)], "add_generation_prompt": prompt}
                              for messages, prompt in parts])  # fmt: skip
        except TemplateError as fault:
            raise self._refused(fault) from None

    def _taken(self, messages: Sequence[Message]) -> list[Any]:
        """Return messages as JSON types, with content parts joined to text if the template does not support them."""
        plain = [_with_reasoning(_plain(message)) for message in messages]
        if any(isinstance(message.get("content"), list) for message in plain) and not self._reads_parts:
            plain = [{**message, "content": _joined(message.get("content"))} for message in plain]
        written = json.dumps(plain, ensure_ascii=False)
        if _BEGIN in written or _END in written:
            raise DataError("the messages contain U+FDD0 or U+FDD1, which are not characters; remove them")
        return plain

    def _run(self, variables: Sequence[Mapping[str, Any]]) -> list[str]:
        return of_this_process().render(self.source, self._now, variables)

    def _refused(self, fault: TemplateError) -> DataError:
        """Convert a failure of the template to a DataError with a remedy."""
        if fault.kind == "security":
            return DataError(f"{self.where} does something that Jinja's sandbox forbids ({fault}); choose another one")
        if fault.kind in _GREEDY:
            return DataError(f"{self.where} was stopped: {fault}; choose another one")
        return DataError(f"{self.where} rejects the messages ({fault}); write them as it expects")


# --- template inputs ----------------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    """Convert a value to plain JSON types, so that the template finds no methods on it."""
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
    """Join a list of text parts into one text."""
    if not isinstance(content, list):
        return content
    return "".join(str(part.get("text", "")) if isinstance(part, dict) else str(part) for part in content)


def _with_reasoning(message: Any) -> Any:
    """Return a message with its reasoning, stored under any of the usual keys, under both keys that templates read."""
    found = next((message[name] for name in REASONING if message.get(name) is not None), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}


def _without_marks(marked: str) -> tuple[str, list[Span]]:
    """Remove the marks around answers; return the text and the span of each marked answer, even if empty."""
    parts, answers, at = [], list[Span](), 0
    for piece in re.split(f"({_BEGIN}[^{_END}]*{_END})", marked):
        is_answer = piece.startswith(_BEGIN)
        text = piece.replace(_BEGIN, "").replace(_END, "")
        if is_answer:
            answers.append((at, at + len(text)))
        parts.append(text)
        at += len(text)
    return "".join(parts), answers


def _templates_in(folder: Path) -> tuple[dict[str, str], str]:
    """Return the chat templates of a folder by name, and where they are, for messages."""
    if is_inside(folder, FILE):
        files = {DEFAULT: FILE, OF_TOOLS: f"{FURTHER}/{OF_TOOLS}.jinja"}
        found = {name: _text(folder / file, folder) for name, file in files.items() if is_inside(folder, file)}
        return found, f"the chat template '{shown(folder / FILE)}'"
    source = table_in(folder, CONFIG).get("chat_template")
    if isinstance(source, list):
        source = {str(one.get("name")): one.get("template") for one in source if isinstance(one, Mapping)}
    named = source if isinstance(source, Mapping) else {DEFAULT: source}
    found = {name: text for name, text in named.items() if isinstance(text, str)}
    return found, f"the chat template of '{shown(folder)}'"


def _text(path: Path, folder: Path | None) -> str:
    """Read a chat template; in a folder, reject a link that leads out of it."""
    try:
        inside = None if folder is None else bytes_inside(folder, path.relative_to(folder).as_posix(), LARGEST)
        return (regular_bytes(path, LARGEST) if inside is None else inside).decode("utf-8")
    except UnreadableError as error:
        raise DataError(f"the chat template '{shown(path)}' cannot be read ({error}); check the path") from None
    except UnicodeDecodeError:
        raise DataError(f"the chat template '{shown(path)}' is not UTF-8 text; save it as UTF-8") from None
