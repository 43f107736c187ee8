"""Types of numbers as users write them."""

from typing import Annotated, Literal

from pydantic import BeforeValidator

SHORT = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}

_WRITTEN_OUT = BeforeValidator(lambda value: SHORT.get(value, value) if isinstance(value, str) else value)
Dtype = Annotated[Literal["float32", "bfloat16", "float16"], _WRITTEN_OUT]
"""`float32`, `bfloat16` or `float16`, or their short names (`fp32`, `bf16`, `fp16`)."""
MasterDtype = Annotated[Literal["float32", "bfloat16"], _WRITTEN_OUT]
"""As `Dtype`, without float16."""
