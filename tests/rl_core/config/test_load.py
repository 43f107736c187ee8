"""Reading a configuration: files, overrides, environment variables, and errors that name the key and the nearest right one."""

import pytest
import yaml

from rl_core.config import load_config, parse_config
from rl_core.errors import ConfigError

SMALL = {
    "model": {"name_or_path": "some/model"},
    "data": {"source": {"kind": "files", "path": "prompts.jsonl"}},
    "reward": {"kind": "function", "path": "reward.py"},
}


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"trainer.sed": 1}, r"unknown key trainer\.sed \(did you mean seed\?\)"),
        ({"trainer.temperature": 1}, r"unknown key trainer\.temperature \(it belongs in rollout\.temperature\)"),
        ({"trainer.param_offload": True}, r"unknown key trainer\.param_offload \(it belongs in fsdp\.param_offload\)"),
        ({"data.source.formt": "csv"}, r"unknown key data\.source\.formt \(did you mean format\?\)"),
        ({"reward.pth": "csv"}, r"unknown key reward\.pth \(did you mean path\?\)"),
        ({"trainr": {}}, r"unknown key trainr \(did you mean trainer\?\)"),
        ({"fsdp.wrap_policy.min_num_param": 1}, r"unknown key fsdp\.wrap_policy\.min_num_param \(did you mean min_num_params"),
        ({"critic.fsdp.param_ofload": True}, r"unknown key critic\.fsdp\.param_ofload \(did you mean param_offload\?\)"),
        ({"model_mapping.actr": [0]}, r"unknown key model_mapping\.actr \(did you mean actor\?\)"),
        ({"actor.lora.rnak": 8}, r"unknown key actor\.lora\.rnak \(did you mean rank\?\)"),
        ({"checkpoint.zzz": 8}, r"checkpoint\.zzz \(known keys here: async_save, keep, keep_best, must_save_by, save_steps\)"),
        ({"trainer.seed": "x"}, r"trainer\.seed = 'x': Input should be a valid integer"),
        ({"trainer.seed": {"deep": 1}}, r"--set trainer\.seed\.deep: seed is a value"),
        ({"trainer.seed": 1, "trainer.seed.deep": 1}, r"--set trainer\.seed\.deep: seed is a value"),
        ({"algorithm.gamma": 1.5}, r"algorithm\.gamma = 1\.5"),
        ({"data.source.kind": "hubb"}, r"data\.source\.kind = 'hubb': it must be one of reasoning_gym, files, hub"),
        ({"checkpoint.keep": 1}, r"checkpoint\.keep = 1"),
        ({"model.torch_dtype": "float8"}, r"model\.torch_dtype = 'float8': Input should be 'float32', 'bfloat16' or 'float16'"),
        ({"trainer.train_batch_size": 10, "trainer.ppo_mini_batch_size": 4}, r"does not divide the 10 responses.*use 2 or 5"),
        ({"trainer.train_batch_size": 8, "trainer.gradient_accumulation_steps": 2}, r"contradict each other.*leave one out"),
    ],
)  # fmt: skip
def test_wrong_values_are_refused_in_one_paragraph_that_names_the_key(overrides, said):
    with pytest.raises(ConfigError, match=said) as caught:
        parse_config(SMALL, overrides, origin="x.yaml")
    assert str(caught.value).startswith(("x.yaml: ", "--set "))
    assert "\n" not in str(caught.value)


def test_each_of_several_mistakes_is_named_but_no_flood_of_them():
    with pytest.raises(ConfigError) as caught:
        parse_config(SMALL, {"trainer.sed": 1, "rollout.n": 0, "foreign": {f"key{number}": 1 for number in range(9)}})
    said = str(caught.value)
    assert all(part in said for part in ("trainer.sed", "rollout.n = 0", "foreign.key0", "4 more unknown keys in foreign"))
    assert "foreign.key7" not in said


def test_what_is_missing_is_named():
    with pytest.raises(ConfigError, match="model is missing"):
        parse_config({})
    with pytest.raises(ConfigError, match=r"data\.source\.kind is missing: it must be one of reasoning_gym, files, hub"):
        parse_config(SMALL | {"data": {"source": {"path": "x"}}})
    with pytest.raises(ConfigError, match=r"reward is missing: data\.source is not reasoning_gym"):
        parse_config({key: value for key, value in SMALL.items() if key != "reward"})


@pytest.mark.parametrize(
    ("content", "said"),
    [("a: [1", "not valid YAML"), ("- 1", "must hold a mapping"), (b"\xff\xfe\x00", "not valid YAML|mapping")],
)
def test_files_that_are_no_configuration(tmp_path, content, said):
    path = tmp_path / "c.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=said):
        load_config(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        load_config(tmp_path / "nowhere.yaml")


def test_overrides_and_numbers_with_an_exponent(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(SMALL) + "actor: {learning_rate: 1e-6}\n")
    config = load_config(path, ["trainer.max_steps=3", "rollout.n=2", "data.suffix= go", "model.revision=null", "rollout.n=4"])
    assert config.actor.learning_rate == 1e-6
    assert (config.trainer.max_steps, config.rollout.n, config.model.revision) == (3, 4, None)


def test_an_override_without_equals_sign_is_explained():
    with pytest.raises(ConfigError, match="key=value"):
        parse_config(SMALL, ["trainer.max_steps"])


def test_an_override_of_a_section_changes_the_keys_that_it_gives():
    values = SMALL | {"fsdp": {"strategy": "hsdp", "wrap_policy": {"auto_wrap": "NO_WRAP"}}, "actor": {"lora": {"rank": 4}}}
    config = parse_config(values, ["fsdp={hsdp_group_size: 2, wrap_policy: {min_num_params: 5}}", "actor.lora={alpha: 2}"])
    assert (config.fsdp.strategy, config.fsdp.hsdp_group_size) == ("hsdp", 2)
    assert (config.fsdp.wrap_policy.auto_wrap, config.fsdp.wrap_policy.min_num_params) == ("NO_WRAP", 5)
    assert config.actor.lora is not None
    assert (config.actor.lora.rank, config.actor.lora.alpha) == (4, 2.0)
    assert parse_config(values, ["actor.lora=null"]).actor.lora is None
    assert parse_config(values | {"actor": {"lora": None}}, ["actor.lora.rank=3"]).actor.lora.rank == 3
    assert parse_config(values | {"actor": {"lora": None}}, ["actor.lora={}"]).actor.lora.rank == 16


def test_an_override_with_another_kind_replaces_the_section():
    config = parse_config(SMALL, ["data.source={kind: hub, name: openai/gsm8k}", "reward.kind=model", "reward.name_or_path=r"])
    assert (config.data.source.kind, config.data.source.name) == ("hub", "openai/gsm8k")
    assert (config.reward.kind, config.reward.name_or_path) == ("model", "r")
    later = parse_config(SMALL, ["data.source={kind: hub, name: openai/gsm8k}", "data.source.name=other/one"])
    assert later.data.source.name == "other/one"
    same = parse_config(SMALL, ["data.source={kind: files, format: csv}"])
    assert (same.data.source.path, same.data.source.format) == ("prompts.jsonl", "csv")


def test_a_section_with_nothing_in_it_is_as_if_it_were_not_there():
    empty = {"fsdp": None, "actor": {"fsdp": {"wrap_policy": None}}, "critic": {}, "mixed_precision": None}
    assert parse_config(SMALL | empty) == parse_config(SMALL)


def test_a_whole_configuration_goes_through_a_file_unchanged():
    config = parse_config(SMALL, {"critic.fsdp.strategy": "ddp", "actor.lora": {}, "model_mapping.actor": [0]})
    again = parse_config(yaml.safe_load(yaml.safe_dump(config.model_dump(mode="json"))))
    assert again == config
    assert again.fsdp_of("critic") == config.fsdp_of("critic")
    assert parse_config(again.model_dump(mode="json"), {"fsdp.strategy": "hsdp"}).fsdp_of("critic").strategy == "ddp"


def test_variables_of_the_environment(monkeypatch):
    monkeypatch.setenv("DATA_DIR", "/data")
    monkeypatch.delenv("NOT_SET", raising=False)
    values = SMALL | {
        "model": {"name_or_path": "${NOT_SET:-here}/model"},
        "data": {"source": {"kind": "files", "path": "${DATA_DIR}/${NOT_SET:-}x.jsonl"}, "suffix": " ${x} $DATA_DIR"},
    }
    config = parse_config(values, {"registry.experiment": "${DATA_DIR}"})
    assert config.model.name_or_path == "here/model"
    assert config.data.source.path == "/data/x.jsonl"
    assert config.data.suffix == " ${x} $DATA_DIR"
    assert config.registry.experiment == "/data"
    with pytest.raises(ConfigError, match=r"registry\.experiment.*NOT_SET"):
        parse_config(values, {"registry.experiment": "${NOT_SET}"})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: {name_or_path: a}\nmodel: {name_or_path: b}", "model is given twice"),
        ("model: {name_or_path: a, revision: x, revision: y}", "revision is given twice"),
        ("model: &m {name_or_path: *m}", "contains itself"),
        (
            "model: {name_or_path: a}\nactor: {learning_rate: .inf}",
            r"actor\.learning_rate = inf: .* finite number",
        ),
        ("model: {name_or_path: a}\nlaunch: {dist_timeout_s: .nan}", r"launch\.dist_timeout_s = nan"),
        ("model: {name_or_path: a}\nfsdp: {use_fsdp: maybe}", r"fsdp\.use_fsdp = 'maybe' is not what belongs there"),
        (
            "model: {name_or_path: a, use_flash_attention_2: 'false'}",
            r"use_flash_attention_2 = 'false' is not what",
        ),
        ("model: {name_or_path: a}\ntrainer: {use_ref_model: 'no way'}", r"use_ref_model = 'no way' is not"),
        ("model: {name_or_path: a}\nactor: {lora: {target_modules: q_proj}}", r"actor\.lora\.target_modules = 'q_proj': "),
    ],
)
def test_what_reads_as_yaml_but_means_nothing(tmp_path, text, said):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        load_config(path)
    assert "\n" not in str(caught.value)
    assert "literal" not in str(caught.value)
