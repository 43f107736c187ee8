"""The whole configuration: one file a section, documented under each field."""

from rl_core.config.load import load_config, parse_config
from rl_core.config.schema import Config

__all__ = ["Config", "load_config", "parse_config"]
