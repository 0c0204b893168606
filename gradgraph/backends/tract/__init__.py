"""The backend ``tract``: an inference library in Rust."""

from gradgraph.backends.backend import Backend, lowering_in

TRACT = Backend(
    name="tract",
    about="standard nodes that tract, a runtime in Rust, supports, for fixed sizes",
    load=lowering_in(f"{__name__}.tract_lowering"),
)
