"""One row of a source as a conversation with its answer, or the reason why it cannot be one."""

from dataclasses import dataclass
from typing import Any

from rl_core.config.data import DataConfig
from rl_core.data import values
from rl_core.digests import digest_json


class Unusable(Exception):
    """A row that is left out.

    Args:
        reason: `bad_row`, `empty_prompt`, `template_error` or `too_long`: what it is counted under.
        detail: what is wrong with this row.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True)
class Conversation:
    """A prompt before the chat template."""

    messages: list[dict[str, Any]]
    """With the configured system prompt and suffix."""
    prompt_id: str
    """sha256 (hex) of the row's own messages and its answer: settings do not change it."""
    is_eval: bool
    question: str
    """The last user message."""
    ground_truth: str | None
    data_source: str
    extra_info: str


def conversation(row: dict[str, Any], config: DataConfig, source_name: str) -> Conversation:
    """Read a row.

    Raises:
        Unusable: its prompt is neither a text nor a list of `{role, content}` messages that ends with the user's.
    """
    own = _messages(row.get(config.prompt_column))
    try:
        return _conversation(own, row, config, source_name)
    except UnicodeEncodeError:
        raise Unusable("bad_row", "it has half a surrogate pair, which is no text in UTF-8") from None


def _conversation(own: list[dict[str, str]], row: dict[str, Any], config: DataConfig, source_name: str) -> Conversation:
    answer = row.get(config.answer_column) if config.answer_column else None
    ground_truth = answer if answer is None or isinstance(answer, str) else values.dumps(answer)
    messages = [dict(message) for message in own]
    messages[-1]["content"] += config.suffix
    if config.system_prompt is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": config.system_prompt})
    used = {config.prompt_column, config.answer_column, config.data_source_column}
    data_source = row.get(config.data_source_column) if config.data_source_column else None
    extra_info = values.dumps({name: value for name, value in row.items() if name not in used})
    extra_info.encode()
    return Conversation(
        messages=messages,
        prompt_id=digest_json([own, ground_truth]),
        is_eval=int(digest_json(own)[:16], 16) < config.eval_fraction * 2**64,  # of the prompt alone: no prompt on both sides
        question=messages[-1]["content"],
        ground_truth=ground_truth,
        data_source=source_name if data_source is None else str(data_source),
        extra_info=extra_info,
    )


def _messages(prompt: Any) -> list[dict[str, str]]:
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not all(isinstance(message, dict) for message in prompt):
        raise Unusable("bad_row", f"the prompt is {_short(prompt)}, neither a text nor a list of messages")
    for message in prompt:
        if not (isinstance(message.get("role"), str) and isinstance(message.get("content"), str)):
            raise Unusable("bad_row", f"the message {_short(message)} lacks a role or a content that is a text")
    if not prompt or (prompt[-1]["role"] == "user" and not prompt[-1]["content"].strip()):
        raise Unusable("empty_prompt", "the prompt is empty")
    if prompt[-1]["role"] != "user":
        raise Unusable("bad_row", f"the last message is by {prompt[-1]['role']!r}; a prompt ends with the user's")
    return [{"role": message["role"], "content": message["content"]} for message in prompt]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"
