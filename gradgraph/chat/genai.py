"""Generation with onnxruntime-genai, with the interface of :class:`gradgraph.chat.decoder.Decoder`."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from gradgraph.chat.prompts import Steps
from gradgraph.chat.sampling import Sampling
from gradgraph.errors import ArgumentError, ModelError, shown

_ALONE = {"num_beams": 1, "num_return_sequences": 1, "min_length": 0, "no_repeat_ngram_size": 0}


class GenaiDecoder(Steps):
    """A decoder that runs a folder with ``genai_config.json``.

    Args:
        folder: the model's folder.
        adapter: an ``.onnx_adapter``, for a model with adapters as optional inputs.

    Raises:
        ArgumentError: onnxruntime-genai is not installed.
        ModelError: onnxruntime-genai cannot load the folder.
    """

    def __init__(self, folder: Path, adapter: str | os.PathLike[str] | None = None) -> None:
        try:
            import onnxruntime_genai as genai  # type: ignore[import-not-found,unused-ignore]
        except ImportError:
            install = "pip install onnxruntime-genai, or generate without it"
            raise ArgumentError("onnxruntime-genai is not installed", remedy=install, shell=install) from None
        self._genai, self._adapters = genai, None
        try:
            self._model: Any = genai.Model(str(folder))
            if adapter is not None:
                self._adapters = genai.Adapters(self._model)
                self._adapters.load(os.fspath(adapter), "adapter")
        except Exception as error:  # raised in C++, without a class of its own
            raise ModelError(
                f"onnxruntime-genai cannot load '{shown(folder)}' ({shown(str(error))}); generate with onnxruntime"
            ) from None

    def steps(
        self, prompts: Sequence[Sequence[int]], stop: Collection[int] = (), sampling: Sampling | None = None
    ) -> Iterator[list[int | None]]:
        """Yield the next token of a prompt until a token of ``stop``; supports one prompt at a time.

        Raises:
            ModelError: onnxruntime-genai fails.
        """
        (prompt,), chosen = prompts, sampling or Sampling()
        parameters = self._genai.GeneratorParams(self._model)
        options: dict[str, Any] = {"max_length": len(prompt) + chosen.max_tokens, "do_sample": chosen.temperature > 0}
        options |= _ALONE  # overrides the search options of genai_config.json
        if chosen.temperature > 0:
            options |= {"temperature": chosen.temperature, "top_p": chosen.top_p, "random_seed": chosen.seed}
            options["top_k"] = chosen.top_k  # 0: sample from all
        parameters.set_search_options(**options, repetition_penalty=chosen.repetition_penalty)
        try:
            generator = self._genai.Generator(self._model, parameters)
            if self._adapters is not None:
                generator.set_active_adapter(self._adapters, "adapter")
            generator.append_tokens(list(prompt))
            while not generator.is_done():
                generator.generate_next_token()
                token = int(generator.get_next_tokens()[0])
                yield [token]
                if token in stop:
                    return
        except RuntimeError as error:  # raised in C++
            forget = "generate with onnxruntime, or if sizes do not match, save the model with "
            raise ModelError(
                f"onnxruntime-genai failed ({shown(str(error))})",
                remedy=f"{forget}gradgraph.surgery.forget_sizes",
                shell=f"{forget}gradgraph surgery --forget-sizes",
            ) from None
