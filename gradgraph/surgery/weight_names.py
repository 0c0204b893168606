"""Matching of a model's weights with the tensors of another library's file, by module path and parameter.

Both sides are compared in one form (``as_ours``, and ``final_norm`` for the last normalisation layer). Paths may begin
differently: ``layers.0.mlp.up_proj`` in a file, ``model.language_model.layers.0.mlp.up_proj`` in a folder. Each pair
of beginnings has as many votes as weights that it matches, and the pair with the most votes decides. Beginnings never
contain the number of a layer, and differ in more than a number (``layer1`` is not ``layer2``). All layers of a stack
have one pair, so that a missing weight of an encoder is not read from the decoder.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Sequence

from gradgraph.errors import DataError, shown
from gradgraph.surgery.peft_names import as_ours

_LAST_NORM = re.compile(r"((?:[^.\d]+\.)*?)(?:norm|final_layernorm|final_layer_norm|embedding_norm|ln_f)\.(\w+)")
_BUILDERS_LAST_NORM = re.compile(r"((?:[^.\d]+\.)*?)layers\.\d+\.final_norm_layernorm\.(\w+)")


_EXPERTS = re.compile(r"(.*)\.moe\.experts\.(\w+_proj)(_bias)?")  # parameters of all experts in one tensor
_EXPERT = re.compile(r"(.*\.moe\.experts\.\d+)\.(w[123])\.(\w+)")  # of one expert
_OF_AN_EXPERT = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
# parts of names of modules in Hugging Face's folders, and the names of onnxruntime-genai's builder
_PARTS = {
    "_norm.layernorm.": "_norm.", ".attn.query_layernorm.": ".attn.q_norm.", ".attn.key_layernorm.": ".attn.k_norm.",
    ".attn.q_layernorm.": ".attn.q_norm.", ".attn.k_layernorm.": ".attn.k_norm.",
    ".operator_norm.": ".operator_layernorm.", ".ffn_norm.": ".ffn_layernorm.",
    ".mlp.experts.": ".moe.experts.", ".feed_forward.experts.": ".moe.experts.", ".mlp.gate.": ".moe.router.",
    ".feed_forward.gate.": ".moe.router.", ".feed_forward.expert_bias": ".moe.expert_bias",
    ".mlp.shared_expert.": ".mlp.", ".mlp.shared_expert_gate.": ".shared_expert_gate.",
}  # fmt: skip

_NUMBERS = re.compile(r"\d+")


def meaning(name: str) -> str:
    """Return the name of a tensor in the form in which both sides are compared."""
    name = as_ours(name)
    for theirs, ours in _PARTS.items():
        name = name.replace(theirs, ours)
    if expert := _EXPERT.fullmatch(name):
        return f"{expert[1]}.{_OF_AN_EXPERT[expert[2]]}.{expert[3]}"
    if experts := _EXPERTS.fullmatch(name):
        return f"{experts[1]}.moe.experts.{experts[2]}.{'bias' if experts[3] else 'weight'}"
    last = _BUILDERS_LAST_NORM.fullmatch(name) or _LAST_NORM.fullmatch(name)
    return f"{last[1]}final_norm.{last[2]}" if last else name


def natural(name: str) -> list[tuple[int, str]]:
    """Return a key to sort names by, in which ``conv.10`` is behind ``conv.9``."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


class TensorNames:
    """The names in a file, searched by the names of a model's weights.

    Args:
        keys: the names of the file's tensors.
        wanted: the names of the model's weights, from which differing beginnings of paths are learned.
    """

    def __init__(self, keys: Iterable[str], wanted: Iterable[str]) -> None:
        found: dict[str, list[str]] = defaultdict(list)
        for key in keys:
            found[meaning(key)].append(key)
        self._keys = {name: same[0] for name, same in found.items() if len(same) == 1}
        self._keys |= {key: key for same in found.values() if len(same) > 1 for key in same}
        self._modules: dict[str, list[str]] = defaultdict(list)
        for name in self._keys:
            self._modules[name.rpartition(".")[0]].append(name)
        own = [meaning(name) for name in wanted]
        votes = self._votes(own)
        self._pairs = [(pair, count) for pair, count in votes.most_common() if pair != ("", "")]
        self._best = self._stacks(own)

    def _votes(self, wanted: Sequence[str]) -> Counter[tuple[str, str]]:
        tails: dict[str, list[list[str]]] = defaultdict(list)
        for name in self._keys:
            parts = name.split(".")
            tails[".".join(parts[-2:])].append(parts)
        votes: Counter[tuple[str, str]] = Counter()
        for name in wanted:
            own = name.split(".")
            for theirs in tails[".".join(own[-2:])]:
                ends = zip(reversed(own), reversed(theirs), strict=False)
                same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], ends))
                begins = (_joined(own[: len(own) - same]), _joined(theirs[: len(theirs) - same]))
                alike = begins[0] != begins[1] and _NUMBERS.sub("", begins[0]) == _NUMBERS.sub("", begins[1])
                if not (alike or any(part.isdigit() for begin in begins for part in begin.split("."))):
                    votes[begins] += 1
        return votes

    def _stacks(self, wanted: Iterable[str]) -> dict[str, set[tuple[str, str]]]:
        """Return the pairs of beginnings that match most weights of each stack of layers; ("", "") is preferred."""
        votes: dict[str, Counter[tuple[str, str]]] = defaultdict(Counter)
        every = {("", ""): 0, **dict(self._pairs)}
        for name in {*wanted}:
            votes[_stack(name)].update(pair for pair in every if _moved(name, *pair) in self._keys)
        best = {}
        for stack, of_one in votes.items():
            most = max(((count, every[pair]) for pair, count in of_one.items()), default=(0, 0))
            chosen = {pair for pair, count in of_one.items() if (count, every[pair]) == most}
            best[stack] = {("", "")} if of_one["", ""] else chosen
        return best

    def _fits_stack(self, pair: tuple[str, str], name: str) -> bool:
        """Whether the layers that a name belongs to are matched by this pair of beginnings."""
        chosen = self._best.get(_stack(name)) if _stack(name) else None
        return not chosen or pair in chosen

    def find(self, name: str) -> str | None:
        """Return the tensor for the weight ``name``, or None.

        Raises:
            DataError: several tensors fit equally well.
        """
        found = self._likeliest(meaning(name), self._keys)
        if len(found) > 1:
            raise DataError(
                f"the weight '{shown(name)}' of the model fits '{shown(found[0])}' and '{shown(found[1])}' of the file "
                "equally well; pass only the tensors of the part that the model contains, such as the encoder",
            )
        return self._keys[found[0]] if found else None

    def of_module(self, module: str) -> list[str]:
        """Return the tensors that belong to ``module`` itself, not to modules in it."""
        return [self._keys[name] for name in self._modules.get(self.module_called(module), ())]

    def module_called(self, module: str) -> str:
        """Return the compared form of a module path of the model in the file; empty unless one module fits."""
        found = self._likeliest(meaning(f"{module}.x").removesuffix(".x"), self._modules)
        return found[0] if len(found) == 1 else ""

    def module_of(self, key: str) -> str:
        """Return the module path of a tensor in the compared form."""
        return meaning(key).rpartition(".")[0]

    def _likeliest(self, name: str, names: Container[str]) -> list[str]:
        """Return ``name`` if it is one of ``names``, otherwise those that it becomes by the pairs with most votes."""
        if name in names:
            return [name]
        best: list[str] = []
        votes = 0
        for pair, count in self._pairs:
            if best and count < votes:
                break
            if (moved := _moved(name, *pair)) in names and self._fits_stack(pair, name):
                best, votes = [*best, *({moved} - {*best})], count
        return best


def _moved(name: str, own: str, theirs: str) -> str:
    """Return a path that begins with ``theirs`` in place of ``own``; empty if it does not begin with that."""
    return f"{theirs}{name[len(own) :]}" if name.startswith(own) else ""


def _stack(name: str) -> str:
    """Return the path of the numbered layers that a name belongs to: ``encoder.block`` for ``encoder.block.0.q``."""
    return name[: found.start()] if (found := re.search(r"\.\d+(\.|$)", name)) else ""


def _joined(parts: Sequence[str]) -> str:
    return "".join(f"{part}." for part in parts)
