"""Models that cannot be trained, each of which a validation has to find, in the step where it shows; and such as can."""

import gc
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from safetensors.torch import load_file, save_file

from rl_core.config import Config, parse_config
from rl_core.config.trainer import LaunchConfig
from rl_core.distributed import World, joined
from rl_core.errors import ModelError
from rl_core.tools.validate import validate
from rl_core.tools.validate_modules import Gradients, gradients
from rl_core.tools.validate_ranks import Ranks
from rl_core.tools.validate_report import Report
from tests.pipeline import ROOT, environment, ppoflow, tiny_settings
from tests.ranks import run_ranks
from tests.rl_core.models.custom import FILES, code_home, custom_model
from tests.tiny import tiny_model, tiny_tokenizer

TRUSTED = {"model.trust_remote_code": True}
LAYERS = "fsdp.wrap_policy.transformer_layer_cls_to_wrap"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """With a sound tiny model (`model`, tied), one with code of its own (`custom`, untied), and PPOFLOW_HOME (`home`)."""
    directory = tmp_path_factory.mktemp("validate")
    tiny_settings(directory)
    custom_model(directory / "custom")
    with code_home(directory / "home"):
        yield directory


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    gc.freeze()  # a validation collects garbage after each role: it need not look at the libraries each time
    with joined(LaunchConfig(device="cpu")) as alone:
        yield alone
    gc.unfreeze()


def settings(directory: Path) -> dict[str, Any]:
    return {
        "model": {"name_or_path": str(directory / "model")},
        "data": {"source": {"kind": "files", "path": str(directory / "prompts.jsonl")}},
        "reward": {"kind": "function", "path": str(directory / "reward.py")},
        "trainer": {"train_batch_size": 4, "per_device_train_batch_size": 3},
        "launch": {"device": "cpu"},
    }


def config(directory: Path, model: str | Path = "model", **overrides: Any) -> Config:
    """`overrides` have `__` for the dots of keys."""
    given = {"model.name_or_path": str(directory / model)}
    return parse_config(settings(directory), given | {key.replace("__", "."): value for key, value in overrides.items()})


def states(report: Report) -> dict[str, str]:
    """By role, the initials of its steps' states."""
    found: dict[str, str] = {}
    for result in report.results:
        found[result.role] = found.get(result.role, "") + result.state[0]
    return found


def failure(report: Report, role: str) -> tuple[str, str]:
    """Step and text of a role's failure."""
    [failed] = [result for result in report.results if result.role == role and result.state == "fail"]
    return failed.step, failed.found


def changed(directory: Path, name: str) -> Path:
    """The model with code of its own, with its forward replaced."""
    copy = Path(shutil.copytree(directory / "custom", directory / name))
    code = FILES["modeling_tiny.py"]
    for old, new in REPLACED[name]:
        assert old in code
        code = code.replace(old, new)
    (copy / "modeling_tiny.py").write_text(code)
    return copy


BACKBONE = "        return super().forward(inputs_embeds=embeddings, **settings)\n"
REPLACED = {
    "frozen": [(BACKBONE, f"        with torch.no_grad():\n    {BACKBONE}")],
    "detached": [("self.embed_tokens(input_ids)", "self.embed_tokens(input_ids).detach()")],
    "raising": [(BACKBONE, "        raise LookupError('no such head')\n")],
    "infinite": [("* self.halves", "* self.halves / 0.0")],
    "cached": [
        (
            BACKBONE,
            "        if input_ids.shape[1] == 1:\n            embeddings = embeddings.flip(-1) * 9\n" + BACKBONE,
        )
    ],
    "two-kinds": [
        (
            "from transformers import",
            "from transformers.models.llama.modeling_llama import LlamaDecoderLayer\nfrom transformers import",
        ),
        ("class TinyModel", "class OtherLayer(LlamaDecoderLayer):\n    pass\n\n\nclass TinyModel"),
        ("        self.register_buffer", "        self.layers[1] = OtherLayer(config, 1)\n        self.register_buffer"),
    ],
}


def test_a_sound_model_passes_in_all_roles(directory: Path, world: World) -> None:
    report = validate(config(directory, reward={"kind": "model", "name_or_path": str(directory / "model")}), world, "x.yaml")
    assert states(report) == {"actor": "pppp", "critic": "pppp", "ref": "ppp", "reward": "ppp"}
    assert report.ok
    said = "\n".join(report.lines())
    assert "load, actor, critic, ref: LlamaForCausalLM, 21,856 parameters" in said
    assert "102 tokens for 102 rows" in said
    assert "wrap, actor (LlamaForCausalLM): fsdp (1 replica(s) × 1 shard(s)), 3 FSDP unit(s), 21,856 parameters" in said
    assert "gradient, critic: 22 of 22 trained parameters have a gradient" in said  # 20 without the tied head, weight, bias
    assert "Note: random reward head" in said
    assert said.endswith("All 14 checks passed.")
    assert Report.from_json(json.loads(json.dumps(report.to_json()))) == report


def test_adapters_are_what_gets_gradients(directory: Path, world: World) -> None:
    report = validate(config(directory, actor__lora={"rank": 2}, algorithm__kl_in="none", algorithm__adv_estimator="rloo",
                             rollout__n=2), world, "x")  # fmt: skip
    assert states(report) == {"actor": "pppp"}
    assert report.results[-1].found == "28 of 28 trained parameters have a gradient"  # two of each of 7 layers in 2 blocks
    step, said = failure(
        validate(config(directory, actor__lora={"target_modules": ["nothing"]}, algorithm__kl_in="none"), world, "x"), "actor"
    )
    assert step == "load"
    assert said.startswith("actor.lora.target_modules: ")


def test_weights_under_other_names_are_converted_first(directory: Path, world: World) -> None:
    copy = Path(shutil.copytree(directory / "model", directory / "bare"))
    weights = load_file(copy / "model.safetensors")
    bare = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    save_file(bare, copy / "model.safetensors", {"format": "pt"})
    report = validate(config(directory, "bare"), world, "x")
    assert states(report) == {"actor": "pppp", "critic": "pppp", "ref": "ppp"}
    assert "converted" in report.results[0].found
    assert [path.name for path in (directory / "home").iterdir() if path.is_dir() and "validate" in path.name] == []


def test_code_that_is_not_allowed(directory: Path, world: World) -> None:
    reward = {"kind": "model", "name_or_path": str(directory / "custom")}
    report = validate(config(directory, "custom", reward=reward), world, "x")
    assert states(report) == {"actor": "fsss", "critic": "fsss", "ref": "fss", "reward": "sss"}
    assert failure(report, "critic")[1].startswith("model.trust_remote_code: ")
    assert "set model.trust_remote_code: true" in report.lines()[-2]
    report = validate(config(directory, reward=reward), world, "x")
    assert states(report) == {"actor": "pppp", "critic": "pppp", "ref": "ppp", "reward": "fss"}
    assert failure(report, "reward")[1].startswith("reward.trust_remote_code: ")
    report = validate(config(directory, "custom", **TRUSTED), world, "x")
    assert report.ok
    assert "code of its own (configuration_tiny.py, modeling_tiny.py, tokenization_tiny.py)" in report.results[0].found


def test_a_tokenizer_that_exceeds_its_embedding(directory: Path, world: World) -> None:
    tiny_model(directory / "small", vocab_size=90)
    small = {"kind": "model", "name_or_path": str(directory / "small")}
    report = validate(config(directory, "small"), world, "x")
    assert states(report) == {"actor": "fsss", "critic": "fsss", "ref": "fss"}
    said = failure(report, "actor")[1]
    assert said.startswith(
        "model.name_or_path: the tokenizer has ids up to 101 ('\\n'), but the model's embedding has only 90 rows."
    )
    report = validate(config(directory, reward=small, algorithm__kl_in="none"), world, "x")
    assert states(report) == {"actor": "pppp", "critic": "pppp", "reward": "fss"}
    assert failure(report, "reward")[1].startswith("reward.name_or_path: the tokenizer has ids up to 101")


def test_a_tokenizer_without_chat_template(directory: Path, world: World) -> None:
    copy = Path(shutil.copytree(directory / "model", directory / "base"))
    (copy / "chat_template.jinja").unlink(missing_ok=True)
    tiny_tokenizer(copy, chat_template=None)
    assert failure(validate(config(directory, "base"), world, "x"), "ref")[1].startswith("model.chat_template: ")


@pytest.mark.parametrize(
    ("listed", "said"),
    [
        (["GPT2Block"], "GPT2Block does not occur in LlamaForCausalLM. Set it to one or more of: LlamaDecoderLayer."),
        (["LlamaMLP"], "misses 2 LlamaDecoderLayer: "),
    ],
)
def test_a_list_that_misses_the_layers(directory: Path, world: World, listed: list[str], said: str) -> None:
    report = validate(config(directory, **{LAYERS: listed}), world, "x")
    assert states(report) == {"actor": "pfss", "critic": "pfss", "ref": "pfs"}
    step, found = failure(report, "actor")
    assert step == "wrap"
    assert found.startswith(LAYERS)
    assert said in found


def test_a_list_that_misses_some_of_the_layers(directory: Path, world: World) -> None:
    copy = changed(directory, "two-kinds")
    report = validate(config(directory, copy, **TRUSTED, **{LAYERS: ["LlamaDecoderLayer"]}), world, "x")
    assert failure(report, "actor")[1].startswith(f"{LAYERS} misses 1 OtherLayer: ")
    assert failure(report, "actor")[1].endswith("Set it to [LlamaDecoderLayer, OtherLayer].")
    parts = {LAYERS: ["LlamaAttention", "LlamaMLP"]}
    wraps: tuple[dict[str, Any], ...] = (
        {LAYERS: ["LlamaDecoderLayer", "OtherLayer"]}, parts, parts | {"fsdp.activation_checkpointing": True},
        {"fsdp.wrap_policy.auto_wrap": "NO_WRAP"}, {"fsdp.wrap_policy.min_num_params": 1_000_000},
    )  # fmt: skip
    for wrap in wraps:
        alone = {"algorithm.kl_in": "none", "algorithm.adv_estimator": "rloo", "rollout.n": 2}
        assert validate(config(directory, copy, **TRUSTED, **wrap, **alone), world, "x").ok, wrap


def test_a_forward_without_gradients(directory: Path, world: World) -> None:
    report = validate(config(directory, changed(directory, "frozen"), **TRUSTED), world, "x")
    assert states(report) == {"actor": "pppf", "critic": "pppf", "ref": "ppp"}
    said = failure(report, "actor")[1]
    assert said.startswith("model.name_or_path: 20 of 21 trained parameters get no gradient: model.embed_tokens.weight, ")
    assert said.count("model.layers.0.") == 9  # the first ten are named
    assert "and 10 more" in said
    assert failure(report, "critic")[1].startswith("model.name_or_path: 20 of 22 trained parameters get no gradient: backbone.")
    frozen = config(directory, "frozen", **TRUSTED, actor__lora={"rank": 2}, algorithm__kl_in="none")
    assert "no gradient reaches a trained parameter of the actor" in failure(validate(frozen, world, "x"), "actor")[1]


def test_one_parameter_without_gradient_is_named(directory: Path, world: World) -> None:
    report = validate(config(directory, changed(directory, "detached"), **TRUSTED), world, "x")
    said = failure(report, "actor")[1]
    assert said.startswith(
        "model.name_or_path: 1 of 21 trained parameters get no gradient: model.embed_tokens.weight. The forward "
    )


def test_what_is_said_of_each_gradient(world: World) -> None:
    """Experts are lists within a layer's list; a frozen parameter is none of those looked at."""
    experts = torch.nn.ModuleList([torch.nn.Linear(2, 1, bias=False) for _ in range(2)])
    module = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.ModuleDict({"experts": experts})])})
    module["used"], module["unused"], module["frozen"] = (torch.nn.Linear(2, 1) for _ in range(3))
    module["frozen"].requires_grad_(False)
    experts[0].weight.grad, module["used"].weight.grad = torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, float("inf")]])
    module["used"].bias.grad = torch.zeros(1)
    assert gradients(module, None) == Gradients(
        trained=[
            "layers.0.experts.0.weight",
            "layers.0.experts.1.weight",
            "used.weight",
            "used.bias",
            "unused.weight",
            "unused.bias",
        ],
        missing=["unused.weight", "unused.bias"],
        idle=["layers.0.experts.1.weight"],
        infinite=["used.weight"],
        zero=["used.bias"],
    )


def test_weights_that_are_not_finite_are_named(directory: Path, world: World) -> None:
    copy = Path(shutil.copytree(directory / "model", directory / "nan"))
    weights = load_file(copy / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 2] = float("nan")
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    report = validate(config(directory, "nan"), world, "x")
    assert states(report) == {"actor": "ppfs", "critic": "ppfs", "ref": "ppf"}
    assert failure(report, "actor")[1].startswith(
        "model.name_or_path: log-probabilities are not finite. model.model.layers.1.mlp.up_proj.weight is the first"
    )
    report = validate(config(directory, changed(directory, "infinite"), **TRUSTED), world, "x")
    assert "it overflows in float32" in failure(report, "ref")[1]


def test_code_that_raises_says_where(directory: Path, world: World) -> None:
    report = validate(config(directory, changed(directory, "raising"), **TRUSTED), world, "x")
    step, said = failure(report, "critic")
    assert step == "forward"
    assert said.startswith("LookupError: no such head (")
    assert "modeling_tiny.py:" in said


def test_a_cache_that_gives_something_else(directory: Path, world: World) -> None:
    report = validate(config(directory, changed(directory, "cached"), **TRUSTED), world, "x")
    assert states(report) == {"actor": "ppfs", "critic": "pppp", "ref": "ppp"}
    assert "nats per token from those of the training's forward" in failure(report, "actor")[1]


def on_two_ranks(rank: int) -> tuple[str, Any, Any]:
    """What a rank learns that fails while the other waits for it in a collective; what both learn when that is through; and of a
    failure on one of them."""

    def fails() -> str:
        raise LookupError("here")

    def waits() -> str:
        dist.barrier()
        return "came through"

    ranks, stuck, first = Ranks(World(rank, 2, torch.device("cpu")), patience=0.5), "", None
    try:
        first = ranks.attempt("forward of the actor", waits if rank == 0 else fails)
    except ModelError as error:
        stuck = str(error)
        dist.barrier()
    second = ranks.attempt("load", (lambda: "fine") if rank == 0 else fails)
    dist.barrier()  # both end at the same time
    return stuck, first, second


def test_a_failure_on_one_rank() -> None:
    (_, released, first), (stuck, _, second) = run_ranks(on_two_ranks, 2)
    assert stuck.startswith("forward of the actor failed on rank 1, and the other ranks wait for it in a collective: LookupError")
    assert released.error == first.error == second.error
    assert first.error.startswith("rank 1: LookupError: here (")
    assert first.found == "fine"


def test_the_program_under_torchrun(directory: Path) -> None:
    """Roles on ranks of their own and on both, and a critic that fails."""
    mapping = {"actor": [0], "critic": [1], "ref": [0, 1]}
    critic = {"fsdp": {"wrap_policy": {"transformer_layer_cls_to_wrap": ["LlamaMLP"]}}}
    given = settings(directory) | {"critic": critic, "model_mapping": mapping}
    (directory / "x.yaml").write_text(yaml.safe_dump(given))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    ended = subprocess.run(
        [*torchrun, "-m", "rl_core.tools.validate", "--config_path", str(directory / "x.yaml"), "--json"],
        cwd=ROOT, env=environment(directory / "home"), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert "exitcode  : 2" in ended.stderr
    report = Report.from_json(json.loads(ended.stdout))
    assert (report.ranks, report.config) == (2, str(directory / "x.yaml"))
    assert states(report) == {"actor": "pppp", "critic": "pfss", "ref": "ppp"}
    wraps = {result.role: result.found for result in report.results if result.step == "wrap"}
    assert wraps["actor"].startswith("actor (LlamaForCausalLM): fsdp (1 replica(s) × 1 shard(s))")
    assert wraps["ref"].startswith("ref (LlamaForCausalLM): fsdp (1 replica(s) × 2 shard(s))")
    assert "10,928 of them (50.0%" in wraps["ref"]


def test_the_command(directory: Path) -> None:
    (directory / "y.yaml").write_text(
        yaml.safe_dump(settings(directory) | {"model": {"name_or_path": str(directory / "custom")}})
    )
    refused = ppoflow("validate", directory / "y.yaml", "--json", home=directory / "home")
    assert refused.returncode == 2, refused.stderr
    report = Report.from_json(json.loads(refused.stdout))
    assert report.config == str(directory / "y.yaml")
    assert states(report) == {"actor": "fsss", "critic": "fsss", "ref": "fss"}
    wrong = ppoflow("validate", directory / "y.yaml", "--set", "trainer.nothing=1", home=directory / "home")
    assert (wrong.returncode, wrong.stdout) == (2, "")
