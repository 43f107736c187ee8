"""A configuration file and the overrides on top of it, made one: under our names, the later layer winning key by key."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rl_core.config.keys import section_keys, value_keys
from rl_core.config.spellings import IMPLIED, MEANT, meaning_of, our_name
from rl_core.errors import ConfigError

Place = tuple[Any, ...]
KINDS = (("data", "source", "kind"), ("reward", "kind"))
FILE, OVERRIDES = 0, 1


@dataclass(frozen=True)
class Setting:
    """A value, and how the user said it."""

    value: Any
    written: str
    """The key under which it was given."""
    said: Any
    """The value that was given there."""
    layer: int
    origin: str
    """What an error about it begins with: the file's name, or `--set`."""

    def __str__(self) -> str:
        return f"{self.written} = {self.said!r}"


class Settings:
    """The values of all keys given so far. A value of a later layer replaces that of an earlier one, under whatever name."""

    def __init__(self) -> None:
        self._all: dict[Place, Setting] = {}

    def add(self, values: Mapping[str, Any], layer: int, origin: str) -> None:
        """Put a layer on top: a file's sections, or overrides, whose keys are dotted.

        Raises:
            ConfigError: a key is given twice in it, under two names and with different values.
        """
        for place, value in _flat(values, split=layer == OVERRIDES):
            written = _dotted(place)
            ours = tuple(our_name(written).split(".")) if our_name(written) != written else place
            if not (value is None and _dotted(ours) in section_keys()):  # a section with nothing in it
                self._set(ours, Setting(value, written, value, layer, origin))
            for section, (key, implied) in IMPLIED.items():
                if written.startswith(f"{section}."):
                    self._set(tuple(key.split(".")), Setting(implied, written, value, layer, origin))

    def translate(self) -> None:
        """Replace values of other names by what they mean in ours; when all layers are there, since a meaning may depend on
        other keys.

        Raises:
            ConfigError: a value cannot mean anything, or contradicts one given under our name.
        """
        late = {place: meaning for place in self._all if (meaning := meaning_of(_dotted(place))) is not None}
        order = list(MEANT)
        for place in sorted(late, key=lambda place: order.index(_dotted(place)) if _dotted(place) in order else -1):
            setting = self._all.pop(place)
            if setting.value is None or setting.value == {}:
                continue
            try:
                meant = late[place](setting.value, self._lookup)
            except TypeError:
                raise ConfigError(f"{setting.origin} {setting} is not what belongs there.") from None
            except ConfigError as error:
                raise ConfigError(f"{setting.origin} {error}") from None
            for key, value in meant.items():
                ours = tuple(key.split("."))
                if ours not in self._all or self._all[ours].layer <= setting.layer:
                    self._set(ours, Setting(value, setting.written, setting.said, setting.layer, setting.origin))

    def nested(self) -> dict[str, Any]:
        """Sections in sections, as the schema has them."""
        result: dict[str, Any] = {}
        for place, setting in self._all.items():
            section = result
            for name in place[:-1]:
                section = section.setdefault(name, {})
            section[place[-1]] = section.get(place[-1], {}) if setting.value == {} else setting.value
        return result

    def written(self) -> dict[str, str]:
        """Under which other names keys of ours were given."""
        return {_dotted(place): setting.written for place, setting in self._all.items() if setting.written != _dotted(place)}

    def _lookup(self, key: str) -> Any:
        setting = self._all.get(tuple(key.split(".")))
        return None if setting is None else setting.value

    def _set(self, place: Place, setting: Setting) -> None:
        old = self._all.get(place)
        if old is not None and old.layer == setting.layer and old.written != setting.written and old.value != setting.value:
            raise ConfigError(
                f"{setting.origin} {old} and {setting} contradict each other: both set {_dotted(place)}; leave one out."
            )
        if place in KINDS and old is not None and old.value != setting.value:
            self._forget(place[:-1], before=setting.layer)  # what belonged to the other kind
        if setting.value != {}:
            self._forget(place, before=setting.layer)
        for depth in range(1, len(place)):
            above = self._all.get(place[:depth])
            if _dotted(place[:depth]) in value_keys() or (above and above.layer == setting.layer and above.value != {}):
                raise ConfigError(f"{setting.origin} {setting.written}: {place[depth - 1]} is a value, not a section.")
            self._all.pop(place[:depth], None)
        self._all[place] = setting

    def _forget(self, section: Place, before: int) -> None:
        for place in [place for place in self._all if place[: len(section)] == section and self._all[place].layer < before]:
            del self._all[place]


def _flat(values: Mapping[str, Any], above: Place = (), split: bool = False) -> Iterator[tuple[Place, Any]]:
    for name, value in values.items():
        place = (*above, *(name.split(".") if split else [name]))
        if isinstance(value, Mapping) and value:
            yield from _flat(value, place)
        else:
            yield place, value


def _dotted(place: Place) -> str:
    return ".".join(map(str, place))
