"""Whether a training fits: bytes on each GPU phase by phase, in host memory and on disk, before anything is loaded.

Only config.json (of a model with code of its own, that too) is read. Predictions are of `torch.cuda.max_memory_allocated`; what
else a GPU needs is left free (`usable`).
"""

from dataclasses import dataclass, replace
from pathlib import Path

from rl_core.config import Config, parse_config
from rl_core.config.model import PretrainedModel
from rl_core.errors import ConfigError
from rl_core.models.auto import model_config
from rl_core.models.source import CODE, _snapshot, resolve
from rl_core.tools.plan_memory import Phase, phases
from rl_core.tools.plan_models import Model
from rl_core.tools.plan_roles import FLOAT32, Held, Situation, held

GIB = 2**30
OUTSIDE = GIB
"""Of a GPU's memory that no tensor gets: CUDA's context and kernels, NCCL's buffers."""
FRAGMENTS = 0.03
"""Share of the rest that lies in gaps between tensors."""


@dataclass(frozen=True)
class Plan:
    """What a training needs, against what there is."""

    situation: Situation
    gpu_memory: int
    """Bytes of one GPU."""
    ranks: list[list[Phase]]
    """The phases of each kind of rank."""
    host: int
    """Bytes on each host of what is offloaded, and of the copy from which a checkpoint is written."""
    checkpoint: int
    """Bytes of one."""
    export: int
    """Bytes of the policy in Hugging Face form."""

    @property
    def usable(self) -> int:
        """Bytes that tensors can have."""
        return int((self.gpu_memory - OUTSIDE) * (1 - FRAGMENTS))

    @property
    def peak(self) -> Phase:
        """The phase that needs most."""
        return max((phase for rank in self.ranks for phase in rank), key=lambda phase: phase.total)

    @property
    def fits(self) -> bool:
        """On every GPU in every phase."""
        return self.peak.total <= self.usable

    @property
    def disk(self) -> int:
        """Bytes of the checkpoints that are kept, of the one that is written beside them, and of the exported policy."""
        return self.checkpoint * self.checkpoints + self.export

    @property
    def checkpoints(self) -> int:
        """How many there are at a time, the one that is being written among them."""
        settings = self.situation.config.checkpoint
        return settings.keep + 1 + (settings.keep_best is not None)


def make_plan(situation: Situation, gpu_memory: int) -> Plan:
    """
    Args:
        situation: its configuration is settled.
        gpu_memory: bytes of one GPU.

    Raises:
        ConfigError: roles cannot be laid out over these ranks, or a model not be wrapped or adapted.
        ModelError: a model cannot be built.
    """
    config = situation.config
    roles = [held(situation, role) for role in config.roles()]
    trained = [each for each in roles if each.part.trained]
    actor = next(each for each in roles if each.role == "actor")
    adapters = actor.sizes.trained if actor.part.lora is not None else 0
    return Plan(
        situation,
        gpu_memory,
        phases(situation),
        host=sum(_in_host_memory(each, config.checkpoint.async_save) * min(each.size, situation.per_node) for each in roles),
        checkpoint=sum((each.parameters_trained + each.whole_moments) * each.shards for each in trained),
        export=(actor.whole + adapters) * FLOAT32,
    )


def changed(situation: Situation, changes: dict[str, object], ranks: int | None = None) -> Situation:
    """The same with other keys (dotted), on other ranks. Raises ConfigError where they do not go together."""
    config = parse_config(situation.config.model_dump(mode="json"), changes)
    ranks = ranks or situation.ranks
    return replace(situation, config=config.settled(ranks), ranks=ranks, per_node=min(ranks, max(8, situation.per_node)))


def situation_of(config: Config, model: Model, judge: Model | None, ranks: int, prompt: int | None = None) -> Situation:
    """
    Args:
        config: as it was read.
        ranks: in all.
        prompt: tokens of the longest prompt; None: as long as `data.max_prompt_length` allows.
    """
    per_node = min(ranks, config.launch.nproc_per_node or 8)
    longest = prompt or config.data.max_prompt_length
    return Situation(config=config.settled(ranks), model=model, judge=judge, ranks=ranks, per_node=per_node, prompt=longest)


def described(settings: PretrainedModel, section: str = "model") -> Model:
    """Where the model's config.json is; of a Hugging Face id no more is fetched than it needs.

    Raises:
        ModelError: there is no such model.
    """
    name, path = settings.name_or_path, Path(settings.name_or_path).expanduser()
    gguf = None
    if (path / "config.json").is_file():
        directory = path.absolute()
    elif "://" not in name and not path.exists() and name.count("/") == 1 and not name.startswith((".", "/", "~", "models:")):
        directory = _snapshot(name, settings.revision, ("*.json", CODE), section)
    else:
        source = resolve(settings, section)
        directory, gguf = source.directory, source.gguf
    kind = "AutoModelForCausalLM"
    if section == "reward":
        architectures = model_config(directory, settings.trust_remote_code, section=section).architectures or ()
        if not any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in architectures):
            kind = "AutoModelForSequenceClassification"
    return Model(directory, gguf, settings.trust_remote_code, settings.attn_implementation, kind, section)


def gpu_here() -> int:
    """Bytes of this machine's GPU. Raises ConfigError where there is none."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("--gpu-memory: this machine has no GPU to ask. Say how many GiB one GPU has, such as --gpu-memory 80.")
    return torch.cuda.get_device_properties(0).total_memory


def _in_host_memory(each: Held, copied: bool) -> int:
    total = each.parameters if each.fsdp.param_offload or each.fsdp.offload_policy else 0
    if each.part.trained:
        total += each.moments if each.fsdp.optimizer_offload or each.fsdp.offload_policy else 0
        total += each.parameters_trained if each.fsdp.offload_policy else 0  # gradients
        total += each.parameters_trained + each.whole_moments if copied else 0
    return total
