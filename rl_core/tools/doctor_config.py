"""What a configuration needs of a machine: packages, models, prompts, the user's own code. Nothing large is read or fetched."""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rl_core.config import Config
from rl_core.config.algorithm import UserEstimator, UserPolicyLoss
from rl_core.config.data import FilesSource, HubSource, ReasoningGymSource
from rl_core.config.model import PretrainedModel
from rl_core.config.reward import FunctionReward, MathReward, ModelReward, ReasoningGymReward, WeightedReward
from rl_core.config.roles import TrainedRoleConfig
from rl_core.tools.doctor import Check

SECONDS = 10.0
"""For the Hugging Face hub to answer."""


def config_checks(config: Config) -> Iterator[tuple[str, Callable[[], Check]]]:
    """Name and call of each check; a call may raise an error for users.

    A model of MLflow's registry is left to whoever knows MLflow.
    """
    yield "extras", lambda: check_extras(config)
    models: list[tuple[str, PretrainedModel]] = [("model", config.model)]
    models += [("reward", reward) for reward in _rewards(config.reward) if isinstance(reward, ModelReward)]
    for section, model in models:
        if not model.name_or_path.startswith("models:"):
            yield section, lambda section=section, model=model: check_model(section, model)  # type: ignore[misc]
    yield "prompts", lambda: check_prompts(config)
    yield "own code", lambda: check_code(config)


def check_extras(config: Config, installed: Callable[[str], bool] = lambda module: find_spec(module) is not None) -> Check:
    """The packages that only some configurations need.

    Args:
        installed: whether a module can be imported.
    """
    rewards = list(_rewards(config.reward))
    trained = [name for name in ("actor", "critic") if (own := _trained(config, name)) and own.lora is not None]
    names = [config.model.name_or_path, *(own.name_or_path for own in rewards if isinstance(own, ModelReward))]
    generated = isinstance(config.data.source, ReasoningGymSource)
    needed = {
        "peft": ("pip install peft", [f"{name}.lora" for name in trained]),
        "gguf": ("pip install gguf", ["model.name_or_path" for name in names if ".gguf" in name]),
        "reasoning_gym": (
            "pip install reasoning-gym",
            ["data.source"] * generated + ["reward" for own in rewards if isinstance(own, ReasoningGymReward)],
        ),
        "math_verify": ("pip install math-verify", ["reward" for own in rewards if isinstance(own, MathReward)]),
    }
    missing = {module: why for module, (_, why) in needed.items() if why and not installed(module)}
    places = [*names, *([config.data.source.path] if isinstance(config.data.source, FilesSource) else [])]
    unknown = {place: reason for place in places if (reason := _lacks_file_system(place))}
    if missing or unknown:
        found = [f"{module} is missing, which {' and '.join(dict.fromkeys(why))} needs" for module, why in missing.items()]
        found += [f"{place} cannot be opened ({reason})" for place, reason in unknown.items()]
        installs = [needed[module][0] for module in missing] + ["install what the error names" for _ in unknown]
        return Check("extras", "fail", "; ".join(found), "; ".join(dict.fromkeys(installs)))
    if config.model.attn_implementation == "flash_attention_2" and not installed("flash_attn"):
        remedy = "pip install flash-attn, or set model.attn_implementation: sdpa."
        return Check("extras", "warn", "flash-attn is missing: sdpa is used instead", remedy)
    there = [module for module, (_, why) in needed.items() if why]
    return Check("extras", "pass", f"{', '.join(there)} installed" if there else "none needed")


def check_model(section: str, model: PretrainedModel) -> Check:
    """A local model has its files; one of the hub is in the cache, or there.

    Raises:
        ModelError: there is no such model.
    """
    from rl_core.models.source import resolve

    name = model.name_or_path
    if "://" in name:
        local = next((part.removeprefix("file://") for part in name.split("::") if part.startswith("file://")), None)
        if local is not None and not Path(local).exists():
            remedy = f"Bring the file, or mend {section}.name_or_path (paths are taken from the working directory)."
            return Check(section, "fail", f"{name}: there is no {Path(local).absolute()}", remedy)
        return Check(section, "pass", f"{name} is fetched when it is first needed")
    if Path(name).expanduser().exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        source = resolve(model, section)
        total = sum(path.stat().st_size for path in source.weights)
        return Check(section, "pass", f"{total / 1e9:.2f} GB of weights in {source.directory}")
    return _on_hub(section, name, model.revision, "model")


def check_prompts(config: Config) -> Check:
    """Local files are there; a dataset of the hub can be reached.

    Raises:
        ConfigError: there is no such file.
    """
    from rl_core.data.files import local_files

    source = config.data.source
    if isinstance(source, HubSource):
        return _on_hub("prompts", source.name, source.revision, "dataset")
    if not isinstance(source, FilesSource):
        return Check("prompts", "pass", f"{source.size:,} problems of {source.dataset}")
    if "://" in source.path or "::" in source.path:
        return Check("prompts", "pass", f"{source.path} is fetched when it is first needed")
    return Check("prompts", "pass", f"{len(local_files(source))} file(s) in {source.path}")


def check_code(config: Config) -> Check:
    """The user's own functions are there, and are Python; they are not run.

    Raises:
        ConfigError: no such file or module, or it is no Python.
    """
    from rl_core.user_code import code_fingerprint, module_fingerprint

    algorithm, files, modules = config.algorithm, dict[str, str](), dict[str, str]()
    for reward in _rewards(config.reward):
        if isinstance(reward, FunctionReward):
            files |= {"reward": reward.path} if reward.path else {}
            modules |= {"reward": reward.module} if reward.module else {}
    for field, own in (("adv_estimator", algorithm.adv_estimator), ("policy_loss", algorithm.policy_loss)):
        if isinstance(own, UserEstimator | UserPolicyLoss):
            files[f"algorithm.{field}"] = own.path
    for field, path in files.items():
        code_fingerprint(path, field)
    for field, module in modules.items():
        module_fingerprint(module, field)
    named = [*files.values(), *modules.values()]
    return Check("own code", "pass", ", ".join(named) or "none")


def _on_hub(name: str, repository: str, revision: str | None, kind: str) -> Check:
    from huggingface_hub import HfApi, try_to_load_from_cache

    probe = "config.json" if kind == "model" else "README.md"
    if isinstance(try_to_load_from_cache(repository, probe, revision=revision, repo_type=kind), str):
        return Check(name, "pass", f"{repository} is in the cache")
    try:
        HfApi().repo_info(repository, revision=revision, repo_type=kind, timeout=SECONDS)
    except Exception as error:  # noqa: BLE001 – the hub's, the network's, and that of a bad name
        reason = " ".join(str(error).split())[:200]
        remedy = (
            "Look at its name; a private or gated one needs HF_TOKEN. Without a way to the hub, bring it and give the local path."
        )
        return Check(name, "fail", f"{repository} is not on the Hugging Face hub as seen from here ({reason})", remedy)
    return Check(name, "pass", f"{repository} is on the Hugging Face hub, and fetched when it is first needed")


def _rewards(reward: Any) -> list[Any]:
    return [part.reward for part in reward.parts] if isinstance(reward, WeightedReward) else [reward]


def _trained(config: Config, name: str) -> TrainedRoleConfig | None:
    own = getattr(config, name)
    return own if isinstance(own, TrainedRoleConfig) and name in config.roles() else None


def _lacks_file_system(place: str) -> str | None:
    """Why fsspec cannot open a URL, if it cannot."""
    if "://" not in place:
        return None
    from fsspec import get_filesystem_class

    for part in place.split("::"):
        try:
            get_filesystem_class(part.partition("://")[0])
        except (ImportError, ValueError) as error:
            return str(error)
    return None
