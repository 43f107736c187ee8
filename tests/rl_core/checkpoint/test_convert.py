"""Hugging Face → base artifact: what is written, in which pieces, and what is refused. (The whole way and back, for each family:
tests/rl_core/models/test_families.py.)"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl_core.checkpoint.convert import convert
from rl_core.checkpoint.dcp import stored_tensors
from rl_core.checkpoint.export import export_policy
from rl_core.errors import ModelError
from rl_core.models.source import ModelSource, load_tokenizer, load_tokenizer_dir
from tests.rl_core.models.cases import family, ragged
from tests.tiny import tiny_tokenizer

KINDS = ["llama-tied", "llama-untied", "gpt2"]


def logits(directory: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    assert model.dtype == torch.float32
    with torch.no_grad():
        return model(ragged()[0]).logits


def converted(source: Path, out: Path) -> Path:
    tokenizer = load_tokenizer(ModelSource(source))
    convert(ModelSource(source), tokenizer, out)
    return out


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Source and base artifact of each kind."""
    root = tmp_path_factory.mktemp("convert")
    made = {}
    for kind in KINDS:
        source = tiny_tokenizer(family(root / kind, kind))
        made[kind] = (source, converted(source, root / f"{kind}-base"))
    return made


def test_the_artifact(models: dict[str, tuple[Path, Path]]) -> None:
    source, base = models["llama-tied"]
    assert json.loads((base / "aliases.json").read_text()) == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "lm_head.weight" not in stored_tensors(base / "weights")
    assert (base / "config.json").read_bytes() == (source / "config.json").read_bytes()
    assert (base / "generation_config.json").exists()
    assert json.loads((models["llama-untied"][1] / "aliases.json").read_text()) == {}


def test_large_tensors_go_in_pieces_and_keep_their_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_core.checkpoint.convert.PIECE_BYTES", 1000)
    monkeypatch.setattr("rl_core.checkpoint.writer.FILE_BYTES", 10_000)
    source = family(tmp_path / "m", "llama-untied")
    weights = {name: tensor.bfloat16() for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    stats = convert(ModelSource(source), load_tokenizer(ModelSource(source)), tmp_path / "base")
    assert stats["dtypes"] == ["bfloat16"]
    assert stats["parameters"] == sum(tensor.numel() for tensor in weights.values())
    entry = stored_tensors(tmp_path / "base/weights")["model.embed_tokens.weight"]
    rows = [piece.sizes[0] for piece in entry.chunks]  # of 32 numbers of 2 bytes
    assert max(rows) == 1000 // 64
    assert sum(rows) == entry.size[0]
    assert len(list((tmp_path / "base/weights").glob("*.distcp"))) > 3

    monkeypatch.setattr("rl_core.checkpoint.export.SHARD_BYTES", 20_000)
    export_policy(tmp_path / "base/weights", "", tmp_path / "base", tmp_path / "out", dtype=torch.bfloat16)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    assert all(file.stat().st_size < 25_000 for file in files)
    exported = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert exported.keys() == weights.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in weights.items())
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == weights.keys()


def test_names_that_transformers_translates_keep_their_type(tmp_path: Path) -> None:
    """DeepSeek's files hold each expert by itself, the model all of a layer in one tensor."""
    source = tiny_tokenizer(family(tmp_path / "m", "deepseek-v2"))
    stored = {name: tensor.bfloat16() for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(stored, source / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(settings | {"dtype": "bfloat16"}))
    stats = convert(ModelSource(source), load_tokenizer(ModelSource(source)), tmp_path / "base")
    assert stats["parameters"] == sum(tensor.numel() for tensor in stored.values())
    assert "model.layers.1.mlp.experts.0.up_proj.weight" in stored
    experts = stored_tensors(tmp_path / "base/weights")["model.layers.1.mlp.experts.gate_up_proj"]
    assert (experts.size, experts.properties.dtype) == ((4, 32, 32), torch.bfloat16)


def test_names_without_the_backbone_prefix(models: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    source = Path(shutil.copytree(models["gpt2"][0], tmp_path / "m"))
    weights = {name.removeprefix("transformer."): tensor for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    base = converted(source, tmp_path / "base")
    assert stored_tensors(base / "weights").keys() == stored_tensors(models["gpt2"][1] / "weights").keys()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", "1 missing: model.norm.weight"),
        ("unexpected", "1 unexpected: model.extra"),
        ("shape", r"model.norm.weight \[31\] instead of \[32\]"),
        ("tied", "ties lm_head.weight to model.embed_tokens.weight, but the files hold different values"),
    ],
)
def test_weights_that_do_not_fit(models: dict[str, tuple[Path, Path]], tmp_path: Path, change: str, message: str) -> None:
    source = Path(shutil.copytree(models["llama-tied"][0], tmp_path / "m"))
    weights = load_file(source / "model.safetensors")
    if change == "missing":
        del weights["model.norm.weight"]
    elif change == "unexpected":
        weights["model.extra"] = torch.zeros(3)
    elif change == "shape":
        weights["model.norm.weight"] = torch.zeros(31)
    else:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=message):
        converted(source, tmp_path / "base")


def test_a_file_cut_short(models: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    source = Path(shutil.copytree(models["llama-tied"][0], tmp_path / "m"))
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ModelError, match=r"^model\.name_or_path: .*model\.safetensors is damaged"):
        converted(source, tmp_path / "base")


def test_quantized_weights_are_refused(models: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    source = Path(shutil.copytree(models["llama-tied"][0], tmp_path / "m"))
    settings = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(settings | {"quantization_config": {"quant_method": "gptq", "bits": 4}}))
    with pytest.raises(ModelError, match="quantized"):
        converted(source, tmp_path / "base")


def test_export_without_such_a_policy(models: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    _, base = models["llama-tied"]
    with pytest.raises(ModelError, match=r"'actor\.'"):
        export_policy(base / "weights", "actor.", base, tmp_path / "out")


def test_gguf(models: dict[str, tuple[Path, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GGUF as llama.cpp writes it (rotary halves interleaved) gives the model that it was made from."""
    import gguf
    from gguf import GGUFWriter

    source, _ = models["llama-untied"]
    weights = load_file(source / "model.safetensors")
    writer = GGUFWriter(tmp_path / "tiny.gguf", "llama")
    writer.add_name("tiny")
    writer.add_context_length(256)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(102)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([chr(code) for code in range(33, 127)] + ["ab", "cd", *(f"<{number}>" for number in range(6))])
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(96)
    writer.add_eos_token_id(97)
    writer.add_chat_template("{{ messages[0].content }}")
    names = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "post_attention_layernorm": "ffn_norm",
        "input_layernorm": "attn_norm", "model.layers": "blk",
    }  # fmt: skip
    for name, tensor in weights.items():
        heads = 4 if "q_proj" in name else 2 if "k_proj" in name else 0
        if heads:
            tensor = tensor.reshape(heads, 2, 4, 32).transpose(1, 2).reshape(tensor.shape)
        for theirs, its in names.items():
            name = name.replace(theirs, its)
        writer.add_tensor(name, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    parsed = []

    class Counted(gguf.GGUFReader):
        def __init__(self, *args: Any, **settings: Any) -> None:
            parsed.append(args)
            super().__init__(*args, **settings)

    monkeypatch.setattr(gguf, "GGUFReader", Counted)
    file = ModelSource(tmp_path, "tiny.gguf")
    tokenizer = load_tokenizer(file)
    assert len(parsed) == 1  # transformers would do it twice here and twice below, seconds each time
    stats = convert(file, tokenizer, tmp_path / "base")
    assert len(parsed) == 2
    assert gguf.GGUFReader is Counted
    assert stats["architecture"] == "LlamaForCausalLM"
    export_policy(tmp_path / "base/weights", "", tmp_path / "base", tmp_path / "out")
    torch.testing.assert_close(logits(tmp_path / "out"), logits(source), rtol=0, atol=1e-5)
    tokenizer = load_tokenizer_dir(tmp_path / "out")
    assert tokenizer.chat_template == "{{ messages[0].content }}"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (96, 97)
