"""The tokenized prompts and the converted base model of a training that is started without `ppoflow run`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl_core.artifacts import Artifact, commit, fresh_scratch, open_artifact, set_aside
from rl_core.checkpoint.convert import convert
from rl_core.config import Config
from rl_core.data.sources import source_fingerprint
from rl_core.data.tokenize import tokenize
from rl_core.digests import digest_json
from rl_core.distributed import World
from rl_core.errors import BrokenArtifact, ConfigError
from rl_core.models.source import load_tokenizer, model_fingerprint, resolve, tokenizer_fingerprint
from rl_core.together import together


def prepare(
    given_dataset: Path | None, given_base: Path | None, config: Config, output: Path, world: World
) -> tuple[Artifact, Artifact]:
    """The tokenized prompts and the converted base model: the given ones, else made by rank 0 under the run directory.
    Collective.

    Raises:
        ConfigError: the run directory holds a run that was made from others.
    """
    dataset, base = given_dataset or output / "dataset", given_base or output / "base"

    def make_missing() -> None:
        source = resolve(config.model)
        template = config.model.chat_template
        tokenizer = load_tokenizer(source, template)
        if not given_dataset:
            identity = [tokenizer_fingerprint(source, template), source_fingerprint(config.data), config.data.identity()]
            _make(dataset, identity, lambda scratch: tokenize(config.data, tokenizer, scratch))
        if not given_base:
            identity = [tokenizer_fingerprint(source, template), model_fingerprint(source)]
            _make(base, identity, lambda scratch: convert(source, tokenizer, scratch))

    if not (given_dataset and given_base):
        together(lambda: make_missing() if world.is_main else None)
    return open_artifact(dataset), open_artifact(base)


def _make(path: Path, identity: Any, write: Callable[[Path], dict[str, Any]]) -> None:
    """Commit what `write` makes at `path`, unless the same is there already."""
    key = digest_json(identity)
    if path.exists():
        try:
            if open_artifact(path).key == key:
                return
            if any((path.parent / "checkpoints").glob("step_*")):
                raise ConfigError(
                    f"--output_dir {path.parent} holds another run: its {path.name} was made from other input than this "
                    "configuration names. Give each run a directory of its own."
                )
            reason = f"{path} was made from other input; it is made again."
        except BrokenArtifact as error:
            reason = f"{error} It is set aside and made again."
        print(reason, flush=True)
        set_aside(path)
    print(f"Making {path}", flush=True)
    scratch = fresh_scratch(path)
    results = write(scratch)
    commit(scratch, path, kind=path.name, key=key, results=results)
