"""Sequence parallelism (DeepSpeed-Ulysses)."""
