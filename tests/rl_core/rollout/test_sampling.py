import math

import pytest
import torch

from rl_core.errors import NonFiniteError
from rl_core.rollout.sampling import allowed, sample, uniform


def slow_uniform(seed, step, sample_index, position, token):
    """The same number by Python's unbounded integers, with the mixer's published constants."""
    full = 2**32 - 1

    def mix(x):
        x ^= x >> 16
        x = x * 0x7FEB352D & full
        x ^= x >> 15
        x = x * 0x846CA68B & full
        return x ^ x >> 16

    keys = []
    for key in (0x243F6A88, 0x85A308D3):
        for word in (seed & full, seed >> 32 & full, step, sample_index & full, position):
            key = mix((key ^ word) + 0x9E3779B9 & full)
        keys.append(key)
    return (mix(mix(token + keys[0] & full) ^ keys[1]) + 0.5) / 2**32


def grid(rows, columns):
    """Sample indices 0..rows-1 × positions 0..columns-1, flattened."""
    return torch.arange(rows).repeat_interleave(columns), torch.arange(columns).repeat(rows)


def test_uniform_is_the_documented_hash():
    samples, positions = torch.tensor([0, 3, 70000, -1]), torch.tensor([0, 5, 1, 9])
    for seed, step in [(0, 0), (1234567890123456789, 17), (-5, 2)]:
        made = uniform(seed, step, samples, positions, 50)
        for row in range(4):
            expected = [slow_uniform(seed, step, samples[row].item(), positions[row].item(), token) for token in range(50)]
            assert made[row].tolist() == pytest.approx(expected, rel=1e-6)


def test_uniform_is_inside_the_interval_even_of_a_long_vocabulary():
    made = uniform(0, 0, torch.tensor([0]), torch.tensor([0]), 3_000_000)
    assert made.dtype == torch.float32
    assert 0 < made.min() < 1e-5
    assert 1 - 1e-5 < made.max() < 1


def test_uniform_does_not_depend_on_the_batch():
    samples, positions = grid(6, 4)
    whole = uniform(7, 3, samples, positions, 11)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    assert torch.equal(uniform(7, 3, samples[order], positions[order], 11), whole[order])
    assert torch.equal(torch.cat([uniform(7, 3, samples[i : i + 1], positions[i : i + 1], 11) for i in range(24)]), whole)
    assert torch.equal(uniform(7, 3, samples, positions, 5), whole[:, :5])


def test_every_argument_matters():
    one = torch.tensor([1])
    base = uniform(1, 1, one, one, 1000)
    for other in (
        uniform(2, 1, one, one, 1000), uniform(1 + 2**32, 1, one, one, 1000), uniform(1, 2, one, one, 1000),
        uniform(1, 1, one + 1, one, 1000), uniform(1, 1, one, one + 1, 1000),
    ):  # fmt: skip
        assert (other == base).sum() == 0


def test_uniform_is_flat():
    """Chi-square of 64 bins over 2 million numbers from neighbouring keys; 63 degrees of freedom, so about 63 ± 11."""
    samples, positions = grid(50, 40)
    made = uniform(3, 1, samples, positions, 1000).flatten()
    counts = torch.bincount((made * 64).long(), minlength=64).double()
    expected = len(made) / 64
    assert ((counts - expected) ** 2 / expected).sum() < 63 + 5 * math.sqrt(2 * 63)


@pytest.mark.parametrize("axis", ["sample", "position", "token", "step", "seed"])
def test_neighbours_are_uncorrelated(axis):
    samples, positions = grid(60, 60)
    first = uniform(5, 5, samples, positions, 65)
    second = {
        "sample": lambda: uniform(5, 5, samples + 1, positions, 65),
        "position": lambda: uniform(5, 5, samples, positions + 1, 65),
        "token": lambda: first.roll(-1, dims=1),
        "step": lambda: uniform(5, 6, samples, positions, 65),
        "seed": lambda: uniform(6, 5, samples, positions, 65),
    }[axis]()
    pair = torch.stack([first.flatten(), second.flatten()]).double()
    assert abs(torch.corrcoef(pair)[0, 1].item()) < 5 / math.sqrt(pair.shape[1])
    # Also not in a way that correlation does not see: the 8 × 8 table of both is flat.
    table = torch.bincount((pair[0] * 8).long() * 8 + (pair[1] * 8).long(), minlength=64).double()
    expected = pair.shape[1] / 64
    assert ((table - expected) ** 2 / expected).sum() < 63 + 5 * math.sqrt(2 * 63)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_sample_draws_from_the_softmax(temperature):
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -4.0])
    samples, positions = grid(400, 100)
    tokens, logprobs = sample(logits.repeat(40000, 1), temperature, seed=11, step=2, sample_index=samples, position=positions)
    weights = [math.exp(logit / temperature) for logit in logits.tolist()]
    probabilities = [weight / sum(weights) for weight in weights]
    assert logprobs.tolist()[:50] == pytest.approx([math.log(probabilities[token]) for token in tokens.tolist()[:50]], abs=1e-5)
    counts = torch.bincount(tokens, minlength=5).tolist()
    statistic = sum((n - 40000 * p) ** 2 / (40000 * p) for n, p in zip(counts, probabilities, strict=True))
    assert statistic < 18.5  # chi-square with 4 degrees of freedom: 0.1 %


def test_rare_tokens_are_drawn():
    """One token in 10,000: the noise has its tail."""
    logits = torch.tensor([0.0, math.log(1e-4)])
    samples, positions = grid(1000, 300)
    tokens, _ = sample(logits.repeat(300_000, 1), 1.0, seed=0, step=0, sample_index=samples, position=positions)
    assert abs(tokens.sum().item() - 30) < 5 * math.sqrt(30)


def test_greedy():
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])
    tokens, logprobs = sample(logits, 0.0, seed=0, step=0, sample_index=torch.arange(2), position=torch.zeros(2).long())
    assert tokens.tolist() == [1, 0]
    expected = [-math.log(math.exp(-3) + 1 + math.exp(-2)), -math.log(1 + math.exp(-2) + math.exp(-4))]
    assert logprobs.tolist() == pytest.approx(expected, abs=1e-6)


def test_half_precision_logits_give_float32_logprobs():
    logits = torch.tensor([[0.0, 1.0]], dtype=torch.bfloat16)
    _, logprobs = sample(logits, 1.0, seed=0, step=0, sample_index=torch.tensor([0]), position=torch.tensor([0]))
    assert logprobs.dtype == torch.float32


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_non_finite_logits_are_an_error(bad, temperature):
    logits = torch.zeros(3, 4)
    logits[1, 2] = bad
    with pytest.raises(NonFiniteError, match=r"step 6, for sample 31 at response token 8 \(1 of 3 rows"):
        sample(logits, temperature, seed=0, step=6, sample_index=torch.tensor([30, 31, 32]), position=torch.tensor([8, 8, 8]))


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(0, 1.0), (1, 1.0), (3, 1.0), (0, 0.3), (0, 0.75), (0, 0.999), (5, 0.6), (500, 1.0)]
)
def test_allowed_tokens_are_the_likeliest(top_k, top_p):
    """Against a sort of each row, in double precision; no two tokens are as likely."""
    scores = torch.randn(12, 60, generator=torch.Generator().manual_seed(1)) * torch.linspace(0.3, 6, 12)[:, None]
    made = allowed(scores, top_k, top_p)
    for row, tokens in zip(scores.double(), made, strict=True):
        shares, order = row.softmax(0).sort(descending=True)
        shares, order = shares[: top_k or None], order[: top_k or None]
        before = (shares / shares.sum()).cumsum(0) - shares / shares.sum()
        assert tokens.nonzero()[:, 0].tolist() == sorted(order[before < top_p].tolist())


def test_draws_among_the_allowed():
    """Their frequencies are those of the softmax among them; log-probabilities are among all tokens."""
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5]).expand(4000, 5)
    index, zero = torch.arange(4000), torch.zeros(4000, dtype=torch.long)
    tokens, logprobs = sample(logits, 0.5, seed=1, step=1, sample_index=index, position=zero, top_k=3, top_p=0.95)
    counts = tokens.bincount(minlength=5)
    three = (torch.tensor([2.0, 1.5, 1.0]) / 0.5).softmax(0)
    assert three[:2].sum() < 0.95
    expected = torch.zeros(5).index_copy(0, torch.tensor([0, 4, 1]), three)
    assert (counts / 4000 - expected).abs().max() < 0.03
    assert torch.allclose(logprobs, (logits[0] / 0.5).log_softmax(0)[tokens])
