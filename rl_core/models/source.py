"""Where a base model comes from: a local directory or file, an fsspec URL, a Hugging Face id.

`resolve` brings the files to this machine and imports neither torch nor transformers, since a run of which every stage is
reused does no more than this.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rl_core.config.model import PretrainedModel
from rl_core.digests import digest_files
from rl_core.errors import ConfigError, ModelError
from rl_core.home import home
from rl_core.models.auto import code_files, loading, model_config
from rl_core.models.download import fetch
from rl_core.models.gguf_files import parsed_once, set_special_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "*.tiktoken", "*.jinja", "chat_template.json",
    "additional_chat_templates/*.jinja",
)  # fmt: skip
"""What transformers reads a tokenizer from."""
WANTED = ("*.safetensors", "*.json", *TOKENIZER_FILES)
"""What is fetched of a remote directory; of a trusted one its code too."""
CODE = "*.py"


@dataclass(frozen=True)
class ModelSource:
    """A model's files on this machine."""

    directory: Path
    gguf: str | None = None
    """Name of the GGUF file in `directory` that is the model, tokenizer included; None: safetensors."""
    revision: str | None = None
    """Commit of a Hugging Face id."""
    trusted: bool = False
    """Whether Python code of the model's own may run (`trust_remote_code`); it is part of the model then."""
    section: str = "model"
    """Of the configuration, for messages."""

    @property
    def weights(self) -> list[Path]:
        """The files of the weights, by name."""
        return [self.directory / self.gguf] if self.gguf else sorted(self.directory.glob("*.safetensors"))

    @property
    def code(self) -> list[Path]:
        """The model's own Python files, where they may run."""
        return code_files(self.directory) if self.trusted and not self.gguf else []


def resolve(config: PretrainedModel, section: str = "model") -> ModelSource:
    """Find the model, and download it into PPOFLOW_HOME where it is not local.

    Args:
        section: where `config` stands in the configuration, for messages.

    Raises:
        ModelError: there is no such model, it cannot be reached, or it has no config.json or no safetensors.
        ConfigError: a revision of what has none.
    """
    name = config.name_or_path
    if name.startswith("models:"):
        raise ModelError(
            f"{section}.name_or_path: {name} is a model registered in MLflow, which `ppoflow run` resolves. "
            "Here give a directory, a .gguf file, a URL or a Hugging Face id."
        )
    path = Path(name).expanduser()
    revision = None
    if config.revision is not None and ("://" in name or path.exists()):
        raise no_revision(name, section)
    wanted = (*WANTED, CODE) if config.trust_remote_code else WANTED
    if "://" in name:
        path = fetch(name, wanted, section)
    elif not path.exists():
        if path.suffix == ".gguf" or name.startswith((".", "/", "~")) or name.count("/") > 1:
            raise ModelError(
                f"{section}.name_or_path: {path.absolute()} does not exist. "
                "Give a directory of safetensors, a .gguf file, a URL or a Hugging Face id (owner/name)."
            )
        path = _snapshot(name, config.revision, wanted, section)
        revision = path.name
    path = path.absolute()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{section}.name_or_path: {path} is a file, but not a .gguf. Give the directory that it is in.")
        return ModelSource(path.parent, path.name, section=section)
    return _checked(ModelSource(path, revision=revision, trusted=config.trust_remote_code, section=section), name)


def no_revision(name: str, section: str = "model") -> ConfigError:
    """The error for a `revision` beside a model that is not from the Hugging Face hub."""
    return ConfigError(
        f"{section}.revision: only a Hugging Face id has revisions, and {section}.name_or_path is {name}. Leave it out."
    )


def model_fingerprint(source: ModelSource) -> dict[str, str]:
    """sha256 of each file that decides the converted weights, by name (a GGUF's name does not count)."""
    if source.gguf:
        return {"gguf": digest_files(source.weights)[source.directory / source.gguf]}
    settings = [source.directory / name for name in ("config.json", "generation_config.json")]
    return _digests(source.directory, source.weights + source.code + [path for path in settings if path.exists()])


def tokenizer_fingerprint(source: ModelSource, chat_template: str | None) -> dict[str, str]:
    """sha256 of each file that decides how text becomes ids, by name.

    Args:
        chat_template: path of the Jinja file that replaces the tokenizer's.

    Raises:
        ConfigError: there is no such file.
    """
    if source.gguf:
        digests = {"gguf": digest_files(source.weights)[source.directory / source.gguf]}
    else:
        files = {path for pattern in TOKENIZER_FILES for path in source.directory.glob(pattern)}
        digests = _digests(source.directory, sorted(files.union(source.code)))
    if chat_template is not None:
        path = _template(chat_template)
        digests["chat_template"] = digest_files([path])[path]
    return digests


def load_tokenizer(source: ModelSource, chat_template: str | None = None) -> "PreTrainedTokenizerBase":
    """The model's tokenizer, with the chat template of the file `chat_template` where given.

    Raises:
        ModelError: transformers finds no tokenizer.
        ConfigError: there is no such template file.
    """
    from transformers import AutoTokenizer

    # First of all, since the tokenizer of a model that is refused could often be read.
    config = None if source.gguf else model_config(source.directory, source.trusted, section=source.section)
    with loading(source.directory, "the tokenizer", source.trusted, source.section), parsed_once():
        tokenizer = AutoTokenizer.from_pretrained(
            source.directory, config=config, gguf_file=source.gguf, trust_remote_code=source.trusted
        )
        if source.gguf:
            set_special_tokens(tokenizer, source.weights[0])
    if chat_template is not None:
        tokenizer.chat_template = _template(chat_template).read_text(encoding="utf-8")
    return tokenizer


def load_tokenizer_dir(directory: Path, trusted: bool = False) -> "PreTrainedTokenizerBase":
    """The tokenizer that an artifact holds; errors as `load_tokenizer`.

    Args:
        trusted: `trust_remote_code` of the configuration (the files of a stranger's policy say nothing about trust).
    """
    return load_tokenizer(ModelSource(directory, trusted=trusted))


def _template(name: str) -> Path:
    path = Path(name).expanduser().absolute()
    if not path.is_file():
        raise ConfigError(f"model.chat_template: {path} does not exist. Give the path of a Jinja file.")
    return path


def _digests(directory: Path, paths: list[Path]) -> dict[str, str]:
    return {str(path.relative_to(directory)): digest for path, digest in digest_files(paths).items()}


def _checked(source: ModelSource, name: str) -> ModelSource:
    if not (source.directory / "config.json").is_file():
        ggufs = ", ".join(sorted(path.name for path in source.directory.glob("*.gguf")))
        hint = f"Name one of its GGUF files: {ggufs}." if ggufs else "Give the directory that `save_pretrained` wrote."
        raise ModelError(f"{source.section}.name_or_path: {name} has no config.json (looked in {source.directory}). {hint}")
    if not source.weights:
        other = [path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in source.directory.glob(pattern)]
        hint = f"It has {', '.join(sorted(other)[:3])}: convert it to safetensors with save_pretrained." if other else ""
        where = f"{source.section}.name_or_path: {name} has no *.safetensors (looked in {source.directory})."
        raise ModelError(f"{where} {hint}".rstrip())
    return source


def _snapshot(name: str, revision: str | None, wanted: tuple[str, ...], section: str) -> Path:
    """The files of a Hugging Face id, in the user's own cache where one is set, else under PPOFLOW_HOME."""
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    own = any(variable in os.environ for variable in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"))
    field = f"{section}.name_or_path"
    try:
        return Path(
            snapshot_download(
                name, revision=revision, allow_patterns=list(wanted), cache_dir=None if own else home() / "downloads" / "hub"
            )
        )
    except GatedRepoError as error:
        raise ModelError(f"{field}: {name} is gated. Accept its terms on the hub and set HF_TOKEN.") from error
    except RevisionNotFoundError as error:
        raise ModelError(f"{section}.revision: {name} has no revision {revision} on the Hugging Face hub.") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelError(
            f"{field}: there is neither a local path {Path(name).absolute()} nor a model {name} on the Hugging Face hub "
            "(a private one needs HF_TOKEN)."
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, httpx.HTTPError, OSError) as error:
        raise ModelError(
            f"{field}: there is no local path {Path(name).absolute()}, and the Hugging Face hub, where {name} would be, "
            f"cannot be reached ({type(error).__name__}). Give a local path, or run again with a connection."
        ) from error
