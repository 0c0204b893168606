"""Rules of composites: functions that exporters write as several nodes. Importing this package fills the table."""

from gradgraph.rules.composites import (
    dot_product_attention,
    gated_units,
    log_probabilities,
    rms_norm,
)

__all__ = ["dot_product_attention", "gated_units", "log_probabilities", "rms_norm"]
