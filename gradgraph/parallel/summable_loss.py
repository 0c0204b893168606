"""Check that the gradients of a loss can be summed over ranks."""

from __future__ import annotations

from gradgraph.errors import BuildError, listed, shown
from gradgraph.step.manifest import Manifest


def check_loss(manifest: Manifest) -> None:
    """Check that the gradients of a whole batch are the sum of the gradients of the ranks' samples.

    Raises:
        BuildError: if the loss is neither a mean nor a sum over samples.
    """
    if manifest.separate is None or not manifest.separate.differs:
        return
    name, arguments = str(manifest.loss.get("name")), manifest.loss.get("arguments", {}).values()
    several = [a["name"] for a in arguments if isinstance(a, dict) and "name" in a]
    subject = f"the sum of the losses {listed(several)}" if several else f"the loss '{shown(name)}'"
    raise BuildError(
        f"{subject} {manifest.separate.differs}, so the gradients of ranks do not add up to those of one process",
        remedy="train in one process, or use a loss that is a mean or a sum over samples",
        shell="remove --ranks, or use a --loss that is a mean or a sum over samples",
    )
