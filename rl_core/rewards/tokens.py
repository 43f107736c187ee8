"""Prompts and responses as a reward model reads them, whatever tokenizer the policy has."""

import logging
from typing import TYPE_CHECKING

from rl_core.errors import ModelError, RewardError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)


class RewardTokens:
    """Turns the policy's ids into the reward model's.

    Where each token of the policy's vocabulary has the same id in the reward model's, the ids are used as they are, special
    tokens included. Else prompt and response are decoded together without special tokens and encoded again, with the special
    tokens that the reward model's tokenizer puts around any text, and its end token behind a response that ends in a special
    one. The chat template of the reward model's tokenizer is not applied: of a prompt only the ids are known, not the messages,
    so a role's name stands in the text as the policy's template wrote it.

    Args:
        policy: tokenizer of the ids that come in.
        own: the reward model's tokenizer.
        embeddings: rows of its embedding.
        positions: greatest length that it can read; None: any.

    Attributes:
        cut: rows so far that were too long and lost tokens.

    Raises:
        ModelError: the tokenizer has ids that the embedding lacks.
    """

    def __init__(
        self,
        policy: "PreTrainedTokenizerBase",
        own: "PreTrainedTokenizerBase",
        embeddings: int,
        positions: int | None,
    ) -> None:
        self._policy, self._own, self._embeddings, self._positions = policy, own, embeddings, positions
        vocabulary = own.get_vocab()
        self.same = policy.get_vocab().items() <= vocabulary.items()
        self.cut = 0
        marked = {index for index, token in policy.added_tokens_decoder.items() if token.special}
        self._special = marked.union(policy.all_special_ids)
        beyond = {token: index for token, index in vocabulary.items() if index >= embeddings}
        if beyond:
            token, index = max(beyond.items(), key=lambda item: item[1])
            raise ModelError(
                f"reward.name_or_path: the tokenizer has ids up to {index} ({token!r}), but the model's embedding has only "
                f"{embeddings} rows. Give the tokenizer that belongs to the model, or resize its embedding."
            )

    def encode(self, prompts: list[list[int]], responses: list[list[int]]) -> list[list[int]]:
        """The reward model's ids of each prompt with its response, at least one and at most `positions`.

        Of a longer row the left is cut (the beginning of the prompt), but for a first beginning-of-text token. An empty
        response is legal.

        Raises:
            RewardError: an id of the policy's that the reward model has no embedding of.
        """
        rows = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
        rows = self._checked(rows) if self.same else self._translated(rows, responses)
        return [self._fitted(row) for row in rows]

    def _checked(self, rows: list[list[int]]) -> list[list[int]]:
        greatest = max((index for row in rows for index in row), default=0)
        if greatest >= self._embeddings:
            raise RewardError(
                f"reward.name_or_path: the policy wrote the id {greatest}, which the reward model lacks: its embedding has "
                f"{self._embeddings} rows. Give a reward model whose embedding is as large as the policy's, or one with another "
                "tokenizer, for which the text is encoded again."
            )
        return rows

    def _translated(self, rows: list[list[int]], responses: list[list[int]]) -> list[list[int]]:
        texts = self._policy.batch_decode(rows, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        encoded: list[list[int]] = self._own(texts, verbose=False)["input_ids"] if texts else []
        end = self._own.eos_token_id
        return [
            [*row, end] if end is not None and row[-1:] != [end] and response and response[-1] in self._special else row
            for row, response in zip(encoded, responses, strict=True)
        ]

    def _fitted(self, row: list[int]) -> list[int]:
        if not row:  # nothing but special tokens
            return [self._own.eos_token_id or 0]
        if self._positions is None or len(row) <= self._positions:
            return row
        if not self.cut:
            log.warning(
                "reward: a prompt with its response has %d tokens, but the reward model reads %d. The beginning is cut off; "
                "further rows are counted, not named.",
                len(row),
                self._positions,
            )
        self.cut += 1
        begin = row[:1] if row[0] == self._own.bos_token_id else []
        return begin + row[len(row) - self._positions + len(begin) :]
