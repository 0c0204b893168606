"""Graph passes: one file, one paragraph of cases each; idempotent, outputs preserved."""
