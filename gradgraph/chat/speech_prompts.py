"""The tokens around a transcript: language, task, timestamps, and the end of the text, as transformers adds them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gradgraph.chat.task_request import Request
from gradgraph.data.texts.tokenizer_files import table_in
from gradgraph.errors import ArgumentError, DataError, shown, suggestion
from gradgraph.files.atomic import write_atomically
from gradgraph.sound.whisper_languages import LANGUAGES, code_of

GENERATION = "generation_config.json"
MULTILINGUAL = 51865  # minimum vocabulary size of OpenAI's multilingual models
TASKS = ("transcribe", "translate")
_LANGUAGE, _TIME = re.compile(r"<\|([a-z]{2,3})\|>"), re.compile(r"<\|\d+\.\d\d\|>")
_TABLE = "lang_to_id"  # the languages of a model, in its generation options


@dataclass(frozen=True)
class Prompt:
    """The tokens around a transcript.

    Attributes:
        end: the token after a transcript.
        before: the tokens of language and task, between the start token and a transcript.
        untimed: the token before a transcript without timestamps; None if the model has no timestamps.
        times: the tokens of timestamps.
        language, task: what ``before`` says; None for a model of one language.
        languages: the token of each language of the model, by its code.
    """

    end: int
    before: Sequence[int] = ()
    untimed: int | None = None
    times: Collection[int] = frozenset()
    language: str | None = None
    task: str | None = None
    languages: Mapping[str, int] = field(default_factory=dict)

    def answer(self, ids: Sequence[int]) -> list[int]:
        """Return the tokens of a transcript with those around it, which the decoder is trained to answer."""
        untimed = [] if self.untimed is None or any(n in self.times for n in ids) else [self.untimed]
        return [*self.before, *untimed, *ids, self.end]

    def answers(self, request: Request, texts: Sequence[str], place: Callable[[int], str]) -> list[list[int]]:
        """Return the tokens of each transcript; ``place`` names a row in messages.

        Raises:
            DataError: a transcript has a timestamp that is no token.
        """
        found = [*request.tokenizer.ids(texts, False)]
        if self.untimed is not None:
            for i, (text, ids) in enumerate(zip(texts, found, strict=True)):
                if len(_TIME.findall(text)) != sum(n in self.times for n in ids):
                    raise DataError(
                        f"{place(i)} has a timestamp that is no token of the model; write multiples of 0.02 seconds up "
                        "to 30, such as <|1.50|>, or remove the timestamps"
                    )
        return [self.answer(ids) for ids in found]


def prompt_of_text(request: Request) -> Prompt:
    """Return the prompt of a model without languages and timestamps (Moonshine): texts end with ``eos_token_id``.

    Raises:
        ArgumentError: a language or a translation is requested.
        DataError: ``config.json`` names no such token.
    """
    end = request.base.described.get("eos_token_id")
    if not isinstance(end, int):
        raise DataError(f"config.json in '{shown(request.base.path)}' has no eos_token_id; add it from the model")
    _check_no_language(request)
    return Prompt(end)


def prompt_of_whisper(request: Request) -> Prompt:
    """Return the prompt of a Whisper model.

    The language is that of the recipe, of ``generation_config.json``, or of the tokenizer.

    Raises:
        ArgumentError: no language is given, or an unknown one; or the model knows only one.
        DataError: the tokenizer is not that of Whisper.
    """
    recipe, generation, words = request.recipe, table_in(request.base.path, GENERATION), request.tokenizer.words
    untimed, end = _number(request, "<|notimestamps|>"), _number(request, "<|endoftext|>")
    plain = Prompt(end, (), untimed, frozenset(n for token, n in words.items() if _TIME.fullmatch(token)))
    stated = generation.get("is_multilingual")
    if not (stated if isinstance(stated, bool) else (request.base.vocabulary or 0) >= MULTILINGUAL):
        _check_no_language(request)
        return plain
    languages = _languages(words, generation)
    given = recipe.language or _usual_language(request, generation, languages)
    if given is None:
        raise ArgumentError(
            "the model is multilingual, and no language is given",
            remedy="pass the language of the transcripts: language='en'",
            shell="pass the language of the transcripts, such as --language en",
        )
    language = code_of(given)
    if language not in languages:
        known = [*languages, *(LANGUAGES[code] for code in languages if code in LANGUAGES)]
        raise ArgumentError(
            f"the model has no language '{shown(given)}'{suggestion(given.lower(), known)}; pass a code such as 'en', "
            "or a name such as 'english'"
        )
    task = TASKS[recipe.translate]
    before = languages[language], _number(request, f"<|{task}|>")
    return replace(plain, before=before, language=language, task=task, languages=languages)


def _check_no_language(request: Request) -> None:
    if request.recipe.language is not None or request.recipe.translate:
        raise ArgumentError(
            "the model transcribes one language only, and does not translate",
            remedy="omit language and translate",
            shell="omit --language and --translate",
        )


def _languages(words: Mapping[str, int], generation: Mapping[str, Any]) -> dict[str, int]:
    """Return the token of each language of a model, by its code."""
    stated = generation.get(_TABLE)
    known = stated if isinstance(stated, Mapping) else words
    return {match[1]: words[token] for token in known if token in words and (match := _LANGUAGE.fullmatch(token))}


def _usual_language(request: Request, generation: Mapping[str, Any], languages: Mapping[str, int]) -> str | None:
    """Return the language that a folder was fine-tuned for; None if it was not."""
    if isinstance(named := generation.get("language"), str):
        return named
    forced = generation.get("forced_decoder_ids") or request.base.described.get("forced_decoder_ids") or ()
    numbers = [pair[1] for pair in forced if isinstance(pair, list) and len(pair) == 2]
    numbers += next(request.tokenizer.ids([""], True))  # what it adds to each text
    codes = {number: code for code, number in languages.items()}
    return next((codes[number] for number in numbers if isinstance(number, int) and number in codes), None)


def _number(request: Request, token: str) -> int:
    number = request.tokenizer.number_of(token)
    if number is None:
        raise DataError(
            f"the tokenizer of '{shown(request.base.path)}' has no token '{token}'; use the tokenizer.json of Whisper"
        )
    return number


def write_prompt(request: Request, prompt: Prompt) -> None:
    """Write language and task to the generation options of a tuned multilingual model, as transformers' recipe does.

    Options of old exports get the tables of tokens, without which transformers does not use them.
    """
    file = request.out / GENERATION
    if prompt.language is None or not file.is_file():
        return
    kept = {key: value for key, value in table_in(request.out, GENERATION).items() if key != "forced_decoder_ids"}
    tasks = {task: request.tokenizer.number_of(f"<|{task}|>") for task in TASKS}
    tables = {_TABLE: {f"<|{code}|>": number for code, number in prompt.languages.items()},
              "task_to_id": {task: number for task, number in tasks.items() if number is not None}}  # fmt: skip
    changed = {**tables, **kept, "language": prompt.language, "task": prompt.task}
    write_atomically(file, json.dumps(changed, indent=2).encode())
