"""A tiny model whose configuration, class and tokenizer are in Python files of its own, as some on the hub are."""

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.tiny import tiny_model

FILES = {
    "configuration_tiny.py": '''
from pathlib import Path
from transformers import LlamaConfig

with (Path(__file__).parent / "runs.txt").open("a") as runs:
    runs.write("x")


class TinyConfig(LlamaConfig):
    model_type = "tiny_with_code"

    def __init__(self, stretch=1.0, **settings):
        super().__init__(**settings)
        self.stretch = stretch
''',
    "modeling_tiny.py": '''
import torch
from transformers import LlamaForCausalLM, LlamaModel
from .configuration_tiny import TinyConfig


class TinyModel(LlamaModel):
    config_class = TinyConfig

    def __init__(self, config):
        super().__init__(config)
        # As older code has it: a buffer that only the constructor computes, and a tensor that is no buffer.
        self.register_buffer("stretch", torch.tensor([config.stretch]), persistent=False)
        self.halves = torch.tensor([0.5])

    def forward(self, input_ids=None, inputs_embeds=None, **settings):
        embeddings = self.embed_tokens(input_ids) * self.stretch * self.halves
        return super().forward(inputs_embeds=embeddings, **settings)


class TinyForCausalLM(LlamaForCausalLM):
    config_class = TinyConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = TinyModel(config)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, use_cache=None):
        return super().forward(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, past_key_values=past_key_values,
            use_cache=use_cache,
        )
''',
    "tokenization_tiny.py": '''
from transformers import PreTrainedTokenizerFast


class TinyTokenizer(PreTrainedTokenizerFast):
    pass
''',
}  # fmt: skip
STRETCH = 3.0


def custom_model(directory: Path) -> Path:
    """The Llama of `tiny_model`, untied, with embeddings multiplied by STRETCH / 2 in the forward."""
    plain = tiny_model(directory.with_name(f"{directory.name}-plain"), tie=False, initializer_range=0.3)
    shutil.copytree(plain, directory)
    for name, code in FILES.items():
        (directory / name).write_text(code, encoding="utf-8")
    classes = {"AutoConfig": "configuration_tiny.TinyConfig", "AutoModelForCausalLM": "modeling_tiny.TinyForCausalLM"}
    _edit(directory / "config.json", auto_map=classes, model_type="tiny_with_code", stretch=STRETCH)
    _edit(
        directory / "tokenizer_config.json",
        auto_map={"AutoTokenizer": [None, "tokenization_tiny.TinyTokenizer"]},
        tokenizer_class="TinyTokenizer",
    )
    return directory


@contextmanager
def code_home(directory: Path) -> Iterator[Path]:
    """`PPOFLOW_HOME` for tests that load such code: a process imports it from one place, which may not be that of others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PPOFLOW_HOME", str(directory))
        patch.delenv("HF_HOME", raising=False)
        patch.delenv("HF_MODULES_CACHE", raising=False)
        patch.setattr(sys, "path", [place for place in sys.path if not Path(place, "transformers_modules").is_dir()])
        _forget_modules()
        yield directory
    _forget_modules()


def _forget_modules() -> None:
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        del sys.modules[name]


def _edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")
