"""Renders Jinja templates in a subprocess, which ``jinja_worker`` starts, limits and ends.

It runs as a script, and imports only the standard library and jinja2. Requests and answers are lines of JSON; an answer
is ``{"text": …}`` or ``{"fault": …, "reason": …}``. Templates run in Jinja's sandbox, with the filters and functions of
Hugging Face's ``apply_chat_template``.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, NoReturn

BEGIN, END = "\ufdd0", "\ufdd1"  # marks around {% generation %}: not Unicode characters, so not in any text
MEMORY = 500 << 20  # bytes that a template may use in addition to its input
_READY = "ready"
_DIGITS = 128  # of a power, in binary


def environment(now: datetime | None) -> Any:
    """Return Jinja's sandbox with the functions of templates; ``now`` is the time for ``strftime_now``."""
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):  # type: ignore[misc]
        """The block ``{% generation %}`` … ``{% endgeneration %}``: its content is rendered between BEGIN and END."""

        tags = {"generation"}  # noqa: RUF012 - as in jinja2's class

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Callable[[], str]) -> str:
            return f"{BEGIN}{caller()}{END}"

    def refuse(message: str) -> NoReturn:
        raise jinja2.exceptions.TemplateError(message)

    class Namespace(jinja2.utils.Namespace):  # type: ignore[misc]
        """A Jinja namespace that rejects names with a leading underscore, so that templates cannot reach Python."""

        def __init__(*args: Any, **kwargs: Any) -> None:
            given = dict(*args[1:], **kwargs)
            for name in given:
                _check_name(name)
            jinja2.utils.Namespace.__init__(args[0], given)

        def __setitem__(self, name: str, value: Any) -> None:
            _check_name(name)
            super().__setitem__(name, value)

    def _check_name(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"the name {name!r} begins with an underscore")

    class Sandbox(ImmutableSandboxedEnvironment):  # type: ignore[misc]
        """Jinja's sandbox, which rejects ranges of over 100,000 numbers; this one also rejects huge powers."""

        intercepted_binops = frozenset({"**"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > _DIGITS:
                raise jinja2.exceptions.SecurityError("a power of too many digits")
            return super().call_binop(context, operator, left, right)

    made = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    made.filters["tojson"] = _to_json
    made.globals |= {
        "raise_exception": refuse,
        "strftime_now": lambda form: (now or datetime.now()).strftime(form),
        "namespace": Namespace,
        "dict": lambda *args, **kwargs: dict(*args, **kwargs),
    }
    return made


def _to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None,
             sort_keys: bool = False) -> str:  # fmt: skip
    """Convert ``value`` to JSON as Hugging Face does; Jinja's own filter would escape < and >."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def answers(request: dict[str, Any], templates: dict[str, Any]) -> Iterator[dict[str, str]]:
    """Yield the answers to a request up to the first failure: one per set of variables, or one for compiling."""
    if "source" in request:
        yield _answer(request, templates, {})
        return
    for variables in request["variables"]:
        found = _answer(request, templates, variables)
        yield found
        if "fault" in found:
            return


def _answer(request: dict[str, Any], templates: dict[str, Any], variables: dict[str, Any]) -> dict[str, str]:
    """Compile or render one template; return the answer: the text, or the kind and reason of a failure."""
    import jinja2

    try:
        if "source" in request:
            made = environment(None if request["now"] is None else datetime.fromisoformat(request["now"]))
            templates[request["key"]] = made.from_string(request["source"])
            return {"text": ""}
        text = str(templates[request["key"]].render(**variables))
        return {"text": text} if len(text) <= request["most"] else {"fault": "long", "reason": ""}
    except MemoryError:
        return {"fault": "memory", "reason": ""}
    except RecursionError:
        return {"fault": "recursion", "reason": ""}
    except jinja2.exceptions.SecurityError as error:
        return _fault("security", error)
    except Exception as error:  # of any class, as the template is foreign code
        return _fault("source" if "source" in request else "other", error)


def _fault(fault: str, error: Exception) -> dict[str, str]:
    return {"fault": fault, "reason": (str(error).split("\n", 1)[0] or type(error).__name__)[:2000]}


def _bound(seconds: float, given: int) -> None:
    """Limit this process's CPU time, for ``seconds`` of work, and memory, for ``given`` bytes, where supported."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        spent = resource.getrusage(resource.RUSAGE_SELF)
        with contextlib.suppress(OSError, ValueError):  # the parent may have died, too
            most = int(spent.ru_utime + spent.ru_stime + 2 * seconds) + 1
            resource.setrlimit(resource.RLIMIT_CPU, (most, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 - importing pathlib is slow
            used = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY + 16 * given, resource.getrlimit(resource.RLIMIT_AS)[1]))


def main(seconds: float) -> None:
    """Answer requests on stdin until its end; ``seconds`` is the time limit of one rendering."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent
    importlib.import_module("jinja2.sandbox")  # the import is slow, and does not count as the template's time
    templates: dict[str, Any] = {}
    print(_READY, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        _bound(seconds * (1 + len(request.get("variables", ()))), len(line))
        for found in answers(request, templates):
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]))
