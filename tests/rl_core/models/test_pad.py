"""Tokenizers without a pad token of their own: settled alike everywhere, and of no influence on any result."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl_core.checkpoint.convert import convert
from rl_core.checkpoint.export import export_policy
from rl_core.errors import DataError
from rl_core.models.pad import settle_pad
from rl_core.models.policy import PolicyModel
from rl_core.models.source import ModelSource, load_tokenizer
from rl_core.rollout.engine import RolloutEngine
from rl_core.rollout.sync import sync_weights
from tests.rl_core.models.cases import family
from tests.tiny import SPECIAL, tiny_tokenizer

PAD, END, UNKNOWN = (SPECIAL.index(token) for token in ("<pad>", "<end>", "<unk>"))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Without a pad token."""
    directory = tiny_tokenizer(family(tmp_path / "model", "llama-tied"))
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(directory)
    return directory


@pytest.mark.parametrize(
    ("without", "taken", "kind"), [((), PAD, "pad"), (("pad",), END, "eos"), (("pad", "eos"), UNKNOWN, "unk")]
)
def test_no_token_is_added(tmp_path: Path, without: tuple[str, ...], taken: int, kind: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path))
    size = len(tokenizer)
    for name in without:
        setattr(tokenizer, f"{name}_token", None)
    settled = settle_pad(tokenizer)
    assert (settled["pad_token_id"], settled["pad_token_from"], tokenizer.pad_token_id) == (taken, kind, taken)
    assert len(tokenizer) == size


def test_nothing_to_pad_with(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path))
    tokenizer.pad_token = tokenizer.eos_token = tokenizer.unk_token = None
    with pytest.raises(DataError, match="neither a pad nor an eos nor an unk token; give it an eos_token"):
        settle_pad(tokenizer)


def test_base_and_policy_have_the_same_and_embeddings_keep_their_size(source: Path, tmp_path: Path) -> None:
    assert load_tokenizer(ModelSource(source)).pad_token is None
    convert(ModelSource(source), load_tokenizer(ModelSource(source)), tmp_path / "base")
    export_policy(tmp_path / "base/weights", "", tmp_path / "base", tmp_path / "policy")
    for directory in (tmp_path / "base", tmp_path / "policy"):
        assert AutoTokenizer.from_pretrained(directory).pad_token_id == END
    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (source, tmp_path / "policy"))
    assert after.get_input_embeddings().weight.shape == before.get_input_embeddings().weight.shape


def test_pads_and_end_tokens_inside_texts_are_tokens_like_others(source: Path) -> None:
    """Masks come from lengths: neither the id that fills rows (0) nor an eos that is the pad is taken for padding."""
    prompts = [[0, 5, 0, END, 7, 0], [0], [END, END], [8, 0, 9]]
    original = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    engine = RolloutEngine(source, torch.float32, "cpu")
    policy = PolicyModel(original)
    sync_weights(policy, engine)
    stop = 101
    made = engine.generate(
        prompts, [0, 1, 2, 3], max_new_tokens=6, temperature=0.0, seed=0, step=0, stop_ids={stop}, batch_size=4
    )
    for prompt, response in zip(prompts, made.responses, strict=True):
        ids = torch.tensor([prompt])
        expected = original.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=6, eos_token_id=stop, pad_token_id=0
        )
        assert response == expected[0, len(prompt) :].tolist()
    # Rows of one batch, with responses that hold such tokens too.
    rows = [[*prompt, END, 0, 0] for prompt in prompts]
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    ids = torch.tensor([row + [0] * (9 - len(row)) for row in rows])
    with torch.no_grad():
        logprobs, _ = policy(ids, lengths, torch.full((4,), 3), 3, 1.0, False)
        for row, prompt, found in zip(rows, prompts, logprobs, strict=True):
            alone = original(torch.tensor([row])).logits[0].log_softmax(-1)
            expected = [alone[len(prompt) - 1 + place, token] for place, token in enumerate(row[len(prompt) :])]
            torch.testing.assert_close(found, torch.stack(expected), rtol=0, atol=1e-5)
