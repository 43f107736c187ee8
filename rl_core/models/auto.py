"""What transformers builds by name – configurations, models – and one rule for Python code that a model brings along.

`auto_map` in config.json or tokenizer_config.json names classes in files beside them. transformers runs those only where it is
told so (`trust_remote_code`); it is told yes or no in every place, so it never asks on the terminal. Such files are part of the
model: they enter its fingerprint and travel with its weights.
"""

import functools
import json
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.errors import ModelError, PpoflowError
from rl_core.home import home, writable
from rl_core.locks import locked

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

log = logging.getLogger(__name__)

ATTENTIONS = ("flash_attention_2", "sdpa", "eager")
"""Each is replaced by the next one where it cannot be had."""


def code_files(directory: Path) -> list[Path]:
    """The Python files beside a model's config.json, by name."""
    return sorted(directory.glob("*.py"))


@contextmanager
def loading(directory: Path, what: str, trusted: bool = False, section: str = "model") -> Iterator[None]:
    """Let transformers load `what` from `directory` within; what it raises becomes a ModelError.

    Where code of the model's own may run, one process at a time is within: transformers copies the files to where it imports
    them from, not atomically. So nothing within may wait for another process.

    Args:
        trusted: whether that code may run.
        section: of the configuration, for messages.

    Raises:
        ModelError: transformers cannot load it, it needs code that is not trusted, or that code fails.
    """
    from huggingface_hub.errors import StrictDataclassError

    code = code_files(directory) if trusted else []
    known = (StrictDataclassError, OSError, ValueError, KeyError, TypeError, ImportError, RuntimeError)
    expected = (Exception,) if code else known  # their code may raise anything
    with ExitStack() as stack:
        if trusted:
            _check_at_home(directory, section)
        if code:
            stack.enter_context(locked(_modules_cache() / "ppoflow.lock"))
        try:
            yield
        except PpoflowError:
            raise
        except expected as error:
            if not trusted and "trust_remote_code" in str(error):  # so transformers refuses
                files = ", ".join(path.name for path in code_files(directory))
                raise ModelError(
                    f"{section}.trust_remote_code: transformers has no class for the model in {directory}, which brings Python "
                    f"code of its own{files and f' ({files})'}. Read that; to let it run, set {section}.trust_remote_code: true."
                ) from error
            reason = f"{type(error).__name__}: {error}" if code else str(error)
            raise ModelError(f"{section}.name_or_path: transformers cannot read {what} of {directory} ({reason}).") from error


def model_config(
    directory: Path, trusted: bool = False, *, gguf: str | None = None, section: str = "model"
) -> "PretrainedConfig":
    """The transformers configuration in a directory (or in its file `gguf`); arguments and errors as `loading`."""
    from transformers import AutoConfig

    with loading(directory, "the configuration", trusted, section):
        return AutoConfig.from_pretrained(directory, trust_remote_code=trusted, gguf_file=gguf)


def model_of(
    config: "PretrainedConfig",
    dtype: "torch.dtype",
    *,
    attention: str = "sdpa",
    trusted: bool = False,
    kind: str = "AutoModelForCausalLM",
    section: str = "model",
) -> "PreTrainedModel":
    """The model that a configuration describes, with whatever values it starts with, on torch's default device.

    Args:
        config: of `model_config`; it is told the attention that was taken.
        attention: wanted; what the machine or the class has not is replaced (`ATTENTIONS`), and said for flash_attention_2.
        kind: transformers' Auto class.
        trusted, section: as for `loading`, as are the errors.
    """
    import transformers

    directory = config.name_or_path  # one that was not read from anywhere has no code
    with loading(Path(directory or ""), "the model class", trusted and bool(directory), section):
        for choice in ATTENTIONS[ATTENTIONS.index(attention) :]:
            if choice == "flash_attention_2" and not transformers.utils.is_flash_attn_2_available():
                _say("the package flash-attn (for CUDA) is not installed")
                continue
            try:
                build: Any = getattr(transformers, kind).from_config
                return build(config, dtype=dtype, attn_implementation=choice, trust_remote_code=trusted)
            except (ValueError, ImportError) as error:
                failed = error
                if choice == "flash_attention_2":
                    _say(str(error))
        raise failed


@functools.cache
def _say(reason: str) -> None:
    log.warning("model.attn_implementation: flash_attention_2 cannot be used, sdpa is used instead (%s).", reason)


def _check_at_home(directory: Path, section: str) -> None:
    """Raise a ModelError where `auto_map` names code in another repository: nobody would know its version."""
    for name in ("config.json", "tokenizer_config.json"):
        path = directory / name
        entries = json.loads(path.read_text(encoding="utf-8")).get("auto_map", {}) if path.exists() else {}
        for reference in entries.values() if isinstance(entries, dict) else [entries]:
            for place in reference if isinstance(reference, list) else [reference]:
                if place and "--" in place:
                    repository = place.partition("--")[0]
                    raise ModelError(
                        f"{section}.trust_remote_code: auto_map in {path} takes its code from the repository {repository}. Put "
                        f"its *.py files beside it and take {repository}-- out of auto_map."
                    )


def _modules_cache() -> Path:
    """Where transformers imports such code from: under PPOFLOW_HOME, unless the user has said where."""
    from transformers import dynamic_module_utils

    if not {"HF_MODULES_CACHE", "HF_HOME"} & os.environ.keys():
        dynamic_module_utils.HF_MODULES_CACHE = str(home() / "downloads" / "modules")
    return writable(Path(dynamic_module_utils.HF_MODULES_CACHE))
