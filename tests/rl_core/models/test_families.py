"""Hugging Face → base artifact → sharded over two ranks → rollout and checkpoint → Hugging Face, for each family.

No family is named in `rl_core`: what holds for these holds for what transformers knows.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from rl_core.checkpoint.convert import convert
from rl_core.checkpoint.dcp import save_tensors
from rl_core.checkpoint.export import export_policy
from rl_core.groups import make_groups
from rl_core.models.build import build_policy
from rl_core.models.source import ModelSource, load_tokenizer, load_tokenizer_dir
from rl_core.models.tensors import model_tensors
from rl_core.rollout.engine import RolloutEngine
from rl_core.rollout.sync import sync_weights
from tests.ranks import run_ranks
from tests.rl_core.models.cases import FAMILIES, config, family, ragged
from tests.tiny import tiny_tokenizer

PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12], [12], [13, 14, 15], [20, 21, 22, 23, 24]]
TOKENS = 8
STOP = 1


def logits(directory: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()(ragged()[0]).logits


def used(rank: int, bases: dict[str, Path], checkpoints: Path) -> dict[str, dict[str, Any]]:
    """On two ranks: scores of the policies, what a rollout engine makes of their weights, and a checkpoint of twice these."""
    cpu, settings, results = torch.device("cpu"), config(), {}
    group = make_groups(settings, ["actor"], "cpu")["actor"]
    for name, base in bases.items():
        policy = build_policy(base, settings, "actor", group, cpu, trainable=True)
        engine = RolloutEngine(base, torch.float32, cpu, settings.model)
        sync_weights(policy, engine)
        with torch.no_grad():
            results[name] = {
                "logprobs": policy(*ragged(), 1.0, False)[0],
                "logits": engine.model(ragged()[0]).logits,
                "greedy": engine.generate(
                    PROMPTS, [0, 1, 2, 3], max_new_tokens=TOKENS, temperature=0.0, seed=0, step=0, stop_ids={STOP}, batch_size=4
                ).responses,
            }  # fmt: skip
            tensors = model_tensors(policy)
            for tensor in tensors.values():
                tensor.mul_(2)
        save_tensors({f"actor.{key}": tensor for key, tensor in tensors.items()}, checkpoints / name)
    return results


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.fixture(scope="module")
def results(root: Path) -> list[dict[str, dict[str, Any]]]:
    """Of both ranks, from base artifacts."""
    bases = {}
    for name in FAMILIES:
        source = ModelSource(tiny_tokenizer(family(root / name, name)))
        bases[name] = root / f"{name}-base"
        convert(source, load_tokenizer(source), bases[name])
    return run_ranks(used, 2, bases, root / "checkpoints")


@pytest.mark.parametrize("name", FAMILIES)
def test_the_sharded_model_and_its_rollout_are_the_original(name: str, root: Path, results: list[Any]) -> None:
    from transformers import AutoModelForCausalLM

    original = AutoModelForCausalLM.from_pretrained(root / name, dtype=torch.float32).eval()
    ids, prompt, response, width = ragged()
    with torch.no_grad():
        expected = original(ids).logits
    made = [
        original.generate(torch.tensor([p]), do_sample=False, max_new_tokens=TOKENS, eos_token_id=STOP, pad_token_id=0)
        for p in PROMPTS
    ]
    distribution, logprobs = expected.double().log_softmax(-1), torch.zeros(len(ids), width, dtype=torch.float64)
    for row, (start, length) in enumerate(zip(prompt.tolist(), response.tolist(), strict=True)):
        for column in range(length):
            logprobs[row, column] = distribution[row, start + column - 1, ids[row, start + column]]
    for rank in results:
        torch.testing.assert_close(rank[name]["logits"], expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(rank[name]["logprobs"].double(), logprobs, rtol=0, atol=2e-5)
        assert rank[name]["greedy"] == [row[0, len(p) :].tolist() for row, p in zip(made, PROMPTS, strict=True)]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_exported_policy_opens_with_transformers(name: str, root: Path, results: list[Any]) -> None:
    from transformers import AutoModelForCausalLM

    base, same, policy = root / f"{name}-base", root / f"{name}-same", root / f"{name}-policy"
    export_policy(base / "weights", "", base, same)
    assert torch.equal(logits(same), logits(root / name))
    export_policy(root / "checkpoints" / name, "actor.", base, policy)
    original = AutoModelForCausalLM.from_pretrained(root / name)
    opened, report = AutoModelForCausalLM.from_pretrained(policy, output_loading_info=True)
    assert not any(report[f"{what}_keys"] for what in ("missing", "unexpected", "mismatched"))
    for parameter, exported in zip(original.parameters(), opened.parameters(), strict=True):
        assert torch.equal(exported, parameter * 2)
    tokenizer = load_tokenizer_dir(policy)
    assert tokenizer.chat_template == load_tokenizer_dir(root / name).chat_template
    assert tokenizer("1+1=").input_ids == load_tokenizer_dir(root / name)("1+1=").input_ids
