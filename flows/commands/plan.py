"""`ppoflow plan`."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from rl_core.errors import EXIT_USER

Overrides = Annotated[list[str] | None, Parameter(name="--set", negative=(), consume_multiple=False)]


def plan(
    config: Path,
    /,
    *,
    overrides: Overrides = None,
    gpus: Annotated[int | None, Parameter(validator=Number(gte=1))] = None,
    gpu_memory: Annotated[float | None, Parameter(validator=Number(gt=0))] = None,
    prompt_tokens: Annotated[int | None, Parameter(validator=Number(gte=1))] = None,
    as_json: Annotated[bool, Parameter("--json", negative=())] = False,
) -> None:
    """Predict the memory that a training takes on each GPU in each phase, and its disk; where it does not fit, say what would.

    Nothing is loaded: a model's config.json is enough. Exit code 0 if it fits, else 2.

    Parameters
    ----------
    config
        YAML file, such as those in configs/.
    overrides
        key=value, e.g. fsdp.activation_checkpointing=true; may be given several times.
    gpus
        Number of GPUs in all; launch.nproc_per_node if left out, else those of this machine, else 1.
    gpu_memory
        GiB of one GPU; that of this machine if left out.
    prompt_tokens
        Longest prompt; data.max_prompt_length if left out.
    as_json
        Print one JSON document instead.
    """
    import json

    from flows.inputs import model_source
    from rl_core.config import load_config
    from rl_core.config.reward import model_of
    from rl_core.tools.plan import GIB, described, gpu_here, make_plan, situation_of
    from rl_core.tools.plan_models import Model
    from rl_core.tools.plan_proposals import propose
    from rl_core.tools.plan_report import document, lines

    settings = load_config(config, overrides or ())
    memory = gpu_here() if gpu_memory is None else int(gpu_memory * GIB)
    if settings.model.name_or_path.startswith("models:/"):
        source = model_source(settings)
        model = Model(source.directory, source.gguf, source.trusted, settings.model.attn_implementation)
    else:
        model = described(settings.model)
    reward = model_of(settings.reward)
    judge = None if reward is None else described(reward, "reward")
    ranks = gpus or settings.launch.nproc_per_node or _gpus_here()
    made = make_plan(situation_of(settings, model, judge, ranks, prompt_tokens), memory)
    proposal = None if made.fits else propose(made)
    if as_json:
        print(json.dumps(document(made, proposal), indent=1))
    else:
        print(*lines(made, proposal), sep="\n")
    if not made.fits:
        raise SystemExit(EXIT_USER)


def _gpus_here() -> int:
    import torch

    return max(1, torch.cuda.device_count())
