"""The pad token, settled in one way wherever a tokenizer is stored."""

from typing import Any

from rl_core.errors import DataError


def settle_pad(tokenizer: Any) -> dict[str, Any]:
    """Give a tokenizer without a pad token its eos or unk for that: without new tokens, so that embeddings keep their size.

    Which one does not matter to the training, whose masks come from lengths.

    Returns:
        What is recorded: `pad_token`, `pad_token_id`, `pad_token_from` (pad, eos or unk) and `eos_token_id`.

    Raises:
        DataError: it has none of the three.
    """
    for kind in ("pad", "eos", "unk"):
        token = getattr(tokenizer, f"{kind}_token")
        if token is not None:
            tokenizer.pad_token = token
            return {
                "pad_token": token,
                "pad_token_id": tokenizer.pad_token_id,
                "pad_token_from": kind,
                "eos_token_id": tokenizer.eos_token_id,
            }
    raise DataError(
        f"model.name_or_path: the tokenizer of {tokenizer.name_or_path or 'the model'} has neither a pad nor an eos nor an unk "
        "token; give it an eos_token in its tokenizer_config.json."
    )
