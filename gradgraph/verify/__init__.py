"""Proof: gradients against central differences in float64."""
