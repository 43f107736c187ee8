"""Types that a device can compute in."""

import functools
import logging

import torch

from rl_core.config.schema import Config, Role

log = logging.getLogger(__name__)


def usable_dtype(config: Config, role: Role, device: torch.device) -> torch.dtype:
    """The type in which a role computes on a device: the configured one, or float16 where a GPU has no bfloat16 (float32 for
    a reference with `disable_half_cast`), which is said once."""
    wanted = config.dtype_of(role)
    if wanted == "bfloat16" and not _has_bfloat16(device.type):
        instead = "float32" if role == "ref" and config.ref_model.disable_half_cast else "float16"
        _say(wanted, instead)
        return getattr(torch, instead)
    return getattr(torch, wanted)


def _has_bfloat16(device_type: str) -> bool:
    return device_type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)


@functools.cache
def _say(wanted: str, instead: str) -> None:
    log.warning("This GPU has no %s; the models compute in %s instead.", wanted, instead)
