"""Scores against plain transformers models in float64, row by row and without padding; on one rank and on two."""

import json
import logging
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rl_core.errors import ModelError
from rl_core.groups import Group, make_groups
from rl_core.models import reward_weights
from rl_core.models.reward_model import CLASSIFIER, build_reward_model, check_reward_model
from rl_core.models.reward_weights import HEAD_SEED
from rl_core.models.source import ModelSource
from tests.ranks import run_ranks
from tests.rl_core.models.cases import config
from tests.rl_core.rewards.tokenizers import BEGIN, END, byte_ids, byte_tokenizer
from tests.tiny import CHARACTERS, SPECIAL, tiny_model, tiny_tokenizer

PAD, POLICY_END = SPECIAL.index("<pad>"), SPECIAL.index("<end>")
PROMPTS = [[2, 20, 30, 1, 4], [2, 40, 1, 4], [2, 50, 51, 52, 53, 54, 1, 4], [2, 60, 1, 4]]
RESPONSES = [[21, POLICY_END], [PAD, POLICY_END, 22, POLICY_END], [23, 24, 25, PAD], []]
"""Pad and end tokens inside and at the end; one cut short; one empty."""
CPU = torch.device("cpu")
SIZES = {
    "vocab_size": len(SPECIAL) + len(CHARACTERS), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3,
    "num_labels": 1, "eos_token_id": POLICY_END, "pad_token_id": POLICY_END, "bos_token_id": None,
}  # fmt: skip
EXPERTS = {
    "num_key_value_heads": 4, "moe_intermediate_size": 16, "first_k_dense_replace": 1, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "kv_lora_rank": 8, "q_lora_rank": None, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4, "v_head_dim": 8,
}  # fmt: skip
CODE = """
from torch import nn
from transformers import LlamaConfig, LlamaModel, LlamaPreTrainedModel

class RatedConfig(LlamaConfig):
    model_type = "rated"

class RatedModel(LlamaPreTrainedModel):
    config_class = RatedConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = LlamaModel(config)
        self.score = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
        self.post_init()
"""


def classifier(directory: Path, model_type: str, **settings: Any) -> Path:
    torch.manual_seed(0)
    described = AutoConfig.for_model(model_type, **SIZES | settings)
    AutoModelForSequenceClassification.from_config(described).save_pretrained(directory)
    return tiny_tokenizer(directory)


def own_code(directory: Path) -> Path:
    """A model that transformers does not know, with a head of two layers."""
    namespace: dict[str, Any] = {"__name__": "own_code"}
    exec(CODE, namespace)
    torch.manual_seed(0)
    namespace["RatedModel"](namespace["RatedConfig"](**SIZES)).save_pretrained(directory)
    (directory / "rated.py").write_text(CODE)
    path = directory / "config.json"
    names = {"AutoConfig": "rated.RatedConfig", "AutoModelForSequenceClassification": "rated.RatedModel"}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": names}))
    return tiny_tokenizer(directory)


def expected(directory: Path, rows: list[list[int]]) -> torch.Tensor:
    model = AutoModelForSequenceClassification.from_pretrained(
        directory, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager", trust_remote_code=True
    )
    with torch.no_grad():
        return torch.stack([model.score(model.model(torch.tensor([row])).last_hidden_state[0, -1])[0] for row in rows])


def reward(directory: Path, **settings: Any) -> dict[str, Any]:
    return {"kind": "model", "name_or_path": str(directory), **settings}


def scores_of(rank: int, policy: Path, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    tokenizer, results = AutoTokenizer.from_pretrained(policy), []
    warnings: list[str] = []
    logging.getLogger("rl_core").addHandler(handler := logging.Handler())
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    for sections in cases:
        settings = config(**sections)
        group = make_groups(settings, ["reward"], "cpu")["reward"]
        warnings.clear()
        module = build_reward_model(settings, group, CPU, tokenizer)
        ids, lengths = module.encode(PROMPTS, RESPONSES)
        padded = torch.cat([ids, torch.full((len(ids), 3), 7)], dim=1)
        padded[torch.arange(padded.shape[1]) >= lengths[:, None]] = 9
        with torch.no_grad():
            scores, again = module(ids, lengths), module(padded, lengths)
        parameters = dict(module.named_parameters())
        local = sum(parameter.to_local().numel() for parameter in parameters.values())
        results.append(
            {
                "scores": scores, "again": again, "share": local / sum(parameter.numel() for parameter in parameters.values()),
                "trained": any(parameter.requires_grad for parameter in parameters.values()) or module.training,
                "dtypes": {name.split(".")[0]: parameter.dtype for name, parameter in parameters.items()},
                "attention": module.backbone.config._attn_implementation, "warnings": list(warnings),
            }
        )  # fmt: skip
    return results


FSDP = {"wrap_policy": {"transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer"]}}
"""As the first article has it, whose reward model is a Llama."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("rewards")
    tiny_tokenizer(root / "policy")
    classifier(root / "llama", "llama", pad_token_id=None)
    classifier(root / "qwen2", "qwen2")
    classifier(root / "experts", "deepseek_v2", **EXPERTS)
    own_code(root / "own")
    classifier(root / "bytes", "llama", vocab_size=258)
    byte_tokenizer(root / "bytes")
    tiny_model(root / "causal", initializer_range=0.3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PPOFLOW_HOME", str(root / "home"))
        yield root


@pytest.fixture(scope="module")
def built(root: Path) -> dict[str, list[dict[str, Any]]]:
    """What each rank says of each case: of one rank, then of two."""
    cases = {
        "llama": {"reward": reward(root / "llama"), "fsdp": FSDP},
        "qwen2": {"reward": reward(root / "qwen2")},
        "experts": {"reward": reward(root / "experts")},
        "own": {"reward": reward(root / "own", trust_remote_code=True)},
        "bytes": {"reward": reward(root / "bytes")},
        "causal": {"reward": reward(root / "causal")},
        "low": {"reward": reward(root / "llama", torch_dtype="bfloat16", attn_implementation="eager")},
    }
    shared = {"shared": {"reward": reward(root / "llama", fsdp={"ulysses_sequence_parallel_size": 2})}}
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in [*cases, "shared"]}
    for world, given in ((1, cases), (2, cases | shared)):
        for rank in run_ranks(scores_of, world, root / "policy", list(given.values())):
            for name, result in zip(given, rank, strict=True):
                results[name].append(result)
    return results


def rows() -> list[list[int]]:
    return [prompt + response for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]


def check(results: list[dict[str, Any]], scores: torch.Tensor) -> None:
    assert scores.std() > 0.1
    for result in results:
        torch.testing.assert_close(result["scores"].double(), scores, rtol=0, atol=2e-5)
        torch.testing.assert_close(result["again"], result["scores"], rtol=0, atol=1e-5)
        assert not result["trained"]
        assert not result["warnings"]
    assert [round(result["share"], 1) for result in results] == [1.0] + [0.5] * (len(results) - 1)


@pytest.mark.parametrize("name", ["llama", "qwen2", "experts", "own"])
def test_a_classifier_scores_the_last_token(name: str, root: Path, built: dict[str, Any]) -> None:
    check(built[name], expected(root / name, rows()))


def test_ranks_may_share_a_sequence(root: Path, built: dict[str, Any]) -> None:
    for result in built["shared"]:
        torch.testing.assert_close(result["scores"].double(), expected(root / "llama", rows()), rtol=0, atol=2e-5)


def test_another_tokenizer_reads_the_text(root: Path, built: dict[str, Any]) -> None:
    letters = ["".join(CHARACTERS[index - len(SPECIAL)] for index in row if index >= len(SPECIAL)) for row in rows()]
    ends = [[END], [END], [END], []]  # the third ends in a special token, the fourth not at all
    check(built["bytes"], expected(root / "bytes", [[BEGIN, *byte_ids(t), *end] for t, end in zip(letters, ends, strict=True)]))


def test_a_causal_model_gets_a_head_of_random_values(root: Path, built: dict[str, Any]) -> None:
    model = AutoModelForCausalLM.from_pretrained(root / "causal", dtype=torch.float64).model
    head = torch.randn(32, generator=torch.Generator().manual_seed(HEAD_SEED)).double() / math.sqrt(33)
    with torch.no_grad():
        scores = torch.stack([model(torch.tensor([row])).last_hidden_state[0, -1] @ head for row in rows()])
    for result in built["causal"]:
        torch.testing.assert_close(result["scores"].double(), scores, rtol=0, atol=2e-5)
    assert [len(result["warnings"]) for result in built["causal"]] == [1, 1, 0]
    assert "random reward head: LlamaForCausalLM" in built["causal"][0]["warnings"][0]


def test_types_and_attention_are_those_configured(root: Path, built: dict[str, Any]) -> None:
    full = expected(root / "llama", rows())
    for result in built["low"]:
        assert result["dtypes"] == {"backbone": torch.bfloat16, "value_head": torch.float32}
        assert result["scores"].dtype == torch.float32
        torch.testing.assert_close(result["scores"].double(), full, rtol=0, atol=0.5)
        assert not torch.allclose(result["scores"].double(), full, rtol=0, atol=1e-4)
        assert result["attention"] == "eager"
    assert built["llama"][0]["attention"] == "sdpa"
    assert built["llama"][0]["dtypes"]["backbone"] == torch.float32


def refusal(root: Path, directory: Path) -> str:
    tokenizer = AutoTokenizer.from_pretrained(root / "policy")
    with pytest.raises(ModelError) as caught:
        check_reward_model(config(reward=reward(directory)), CPU, tokenizer)
    return str(caught.value)


def test_what_is_no_reward_model_is_refused_before_it_is_loaded(root: Path, tmp_path: Path) -> None:
    check_reward_model(config(reward=reward(root / "llama")), CPU, AutoTokenizer.from_pretrained(root / "policy"))
    assert "2 outputs" in refusal(root, classifier(tmp_path / "two", "llama", num_labels=2))
    assert "no head `score`" in refusal(root, classifier(tmp_path / "encoder", "bert"))
    assert "reward.trust_remote_code" in refusal(root, root / "own")
    assert "reward.name_or_path" in refusal(root, tmp_path / "nothing")
    other = Path(shutil.copytree(root / "llama", tmp_path / "other"))
    assert "102 rows" in refusal(root, byte_tokenizer(other))


@pytest.mark.parametrize(("missing", "words"), [("score.weight", "1 missing: score.weight"), ("model.norm.weight", "missing")])
def test_weights_that_are_not_the_model_s_are_refused(missing: str, words: str, root: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    directory = Path(shutil.copytree(root / "llama", tmp_path / "broken"))
    tensors = load_file(directory / "model.safetensors")
    del tensors[missing]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForSequenceClassification.from_pretrained(root / "llama")
    alone = Group(ranks=(0,), rank=0, mesh=None, process_group=None)  # type: ignore[arg-type]
    source = ModelSource(directory, section="reward")
    with pytest.raises(ModelError, match=words):
        reward_weights.load(model.state_dict(), source, model, CLASSIFIER, alone)
