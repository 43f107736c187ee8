"""The errors that users meet, and the exit codes of a training process.

Every class says whose turn it is: the user's (`ConfigError`, `DataError`, …: running again changes nothing) or the
machine's. A message is one paragraph that names the field, the file and the remedy; the CLI prints it without traceback.
"""

EXIT_DONE = 0
EXIT_CRASH = 1
"""Anything unforeseen: running again goes on from the last committed checkpoint."""
EXIT_USER = 2
"""The user has to change something first; a retry is pointless."""
EXIT_INTERRUPTED = 75
"""Stopped by a signal after a committed checkpoint (75 is sysexits' EX_TEMPFAIL: run the same command again)."""


class PpoflowError(Exception):
    """Base of all errors whose message alone tells the user what to do."""


class ConfigError(PpoflowError):
    """The configuration is wrong: unknown key, wrong value, contradiction, missing file that it names."""


class LaunchError(PpoflowError):
    """The ranks do not find each other: a missing one, a port in use, a network that lets nothing through."""


class DataError(PpoflowError):
    """The prompts cannot be used: missing column, no rows, no chat template, too many dropped rows."""


class ModelError(PpoflowError):
    """The model cannot be used: no such model, unknown format, weights that do not fit its configuration."""


class RewardError(PpoflowError):
    """The reward function is missing, has the wrong signature or returns no number."""


class NonFiniteError(PpoflowError):
    """Logits, a loss or a gradient is infinite or NaN, so that going on would ruin the weights."""


class StoreError(PpoflowError):
    """The store cannot be written or read."""


class BrokenArtifact(StoreError):
    """A committed directory is not what its manifest says; it must not be used."""


class Interrupted(PpoflowError):
    """Stopped by a signal; running the same command again goes on from the last committed checkpoint."""
