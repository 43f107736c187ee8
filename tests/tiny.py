"""Tiny real models and tokenizers of real transformers classes, written as a user would have them on disk."""

import json
from pathlib import Path
from typing import Any

CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'][0] }}>{{ m['content'] }}<end>{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
SPECIAL = ["<pad>", "<end>", "<u>", "<s>", "<a>", "<unk>"]
CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n"]


def tiny_tokenizer(directory: Path, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """One token per printable ASCII character; `<end>` ends a message and is the eos token, `<pad>` pads."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate(SPECIAL + CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern="", behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(SPECIAL)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>", unk_token="<unk>", clean_up_tokenization_spaces=False
    )
    fast.chat_template = chat_template
    fast.save_pretrained(directory)
    return directory


def tiny_model(directory: Path, tie: bool = True, seed: int = 0, **settings: Any) -> Path:
    """A Llama of two layers (safetensors, float32) with `tiny_tokenizer`, about 30k parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **{
            "vocab_size": len(SPECIAL) + len(CHARACTERS),
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "tie_word_embeddings": tie,
            "eos_token_id": 1,
            "pad_token_id": 0,
            "bos_token_id": None,
        }
        | settings
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(directory)
    return tiny_tokenizer(directory)


def tiny_prompts(path: Path, count: int = 64) -> Path:
    """JSON Lines with `prompt` and `answer`: sums of two digits."""
    rows = ({"prompt": f"{i % 10}+{i // 10 % 10}=", "answer": str(i % 10 + i // 10 % 10)} for i in range(count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
