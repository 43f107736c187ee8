"""Tensors on disk: safe DCP directories, checkpoints of a run, conversion from and to Hugging Face form."""
