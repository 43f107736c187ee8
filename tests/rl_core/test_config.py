"""The configuration: what it takes, what it refuses and how it says so, and what enters an identity."""

import pytest
import yaml

from rl_core.config import Config, load_config, parse_config
from rl_core.errors import ConfigError

SMALL = {
    "model": {"name_or_path": "some/model"},
    "data": {"source": {"kind": "files", "path": "prompts.jsonl"}},
    "reward": {"kind": "function", "path": "reward.py"},
    "registry": {"name": "policy"},
}


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"trainer.learning_rat": 1}, r"unknown key trainer\.learning_rat \(did you mean learning_rate\?\)"),
        ({"trainer.temperature": 1}, r"unknown key trainer\.temperature \(it belongs in rollout\.temperature\)"),
        ({"data.source.formt": "csv"}, r"unknown key data\.source\.formt \(did you mean format\?\)"),
        ({"trainr": {}}, r"unknown key trainr \(did you mean trainer\?\)"),
        ({"trainer.seed": "x"}, r"trainer\.seed = 'x': Input should be a valid integer"),
        ({"algorithm.gamma": 1.5}, r"algorithm\.gamma = 1\.5"),
        ({"data.source.kind": "hubb"}, r"data\.source"),
        ({"checkpoint.keep": 1}, r"checkpoint\.keep = 1"),
        ({"model.torch_dtype": "float16"}, r"model\.torch_dtype = 'float16': Input should be 'float32' or 'bfloat16'"),
        ({"trainer.train_batch_size": 10, "trainer.ppo_mini_batch_size": 4}, r"does not divide the 10 responses.*use 2 or 5"),
        ({"trainer.seed": 1, "trainer.seed.deep": 1}, r"--set trainer\.seed\.deep: seed is a value"),
    ],
)  # fmt: skip
def test_wrong_values_are_refused_in_one_paragraph_that_names_the_key(overrides, said):
    with pytest.raises(ConfigError, match=said) as caught:
        parse_config(SMALL, overrides, origin="x.yaml")
    assert str(caught.value).startswith(("x.yaml: ", "--set "))
    assert "\n" not in str(caught.value)


def test_a_missing_section_is_named():
    with pytest.raises(ConfigError, match="registry is missing"):
        parse_config({key: value for key, value in SMALL.items() if key != "registry"})


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
    path.write_text(yaml.safe_dump(SMALL) + "trainer: {learning_rate: 1e-6}\n")
    config = load_config(path, ["trainer.max_steps=3", "rollout.n=2", "data.suffix= go", "model.revision=null"])
    assert config.trainer.learning_rate == 1e-6
    assert (config.trainer.max_steps, config.rollout.n, config.model.revision) == (3, 2, None)


def test_an_override_without_equals_sign_is_explained():
    with pytest.raises(ConfigError, match="key=value"):
        parse_config(SMALL, ["trainer.max_steps"])


def test_runtime_fields_stay_out_of_the_identity_and_all_others_are_in_it():
    config = parse_config(SMALL)
    same = {
        "model.name_or_path": "other/model", "trainer.max_steps": 9, "trainer.per_device_train_batch_size": 1,
        "launch.nproc_per_node": 4, "fsdp.reshard_after_forward": False, "checkpoint.save_steps": 1, "evaluation.prompts": 3,
        "registry.name": "other", "rollout.batch_size": 2,
    }  # fmt: skip
    assert parse_config(SMALL, same).training_identity() == config.training_identity()
    different = {
        "trainer.seed": 1, "rollout.temperature": 0.5, "algorithm.kl_in": "loss", "model.torch_dtype": "bfloat16",
        "trainer.adam_beta2": 0.95, "fsdp.reduce_dtype": "bfloat16", "trainer.train_batch_size": 8,
    }  # fmt: skip
    for key, value in different.items():
        change = {key: value}
        assert parse_config(SMALL, change).training_identity() != config.training_identity(), change


def test_every_field_of_every_section_is_documented():
    def sections(model):
        yield model
        for field in model.model_fields.values():
            for part in (field.annotation, *getattr(field.annotation, "__args__", ())):
                if hasattr(part, "model_fields"):
                    yield from sections(part)

    for section in sections(Config):
        for name, field in section.model_fields.items():
            if name != "kind" and section is not Config:
                assert field.description, f"{section.__name__}.{name}"


def test_the_number_of_steps_comes_from_max_steps_or_the_epochs():
    assert parse_config(SMALL, {"trainer.max_steps": 7}).total_steps(1000) == 7
    assert parse_config(SMALL, {"trainer.num_train_epochs": 2, "trainer.train_batch_size": 16}).total_steps(100) == 13
