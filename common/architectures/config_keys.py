"""Keys of a config.json, read one by one: by type, in range, with the default of an absent one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from common.architectures.base import CheckpointError, shorten

# Far above any published model: a larger number is a broken file, and would keep the loader busy for hours.
MAX_LAYERS = 1024
MAX_EXPERTS = 4096
# Of plain rotary positions; scaled ones, and those of each kind of layer, have others.


class ConfigKeys:
    """The parsed file; a key that is null is absent. All methods raise CheckpointError, one line that names the key."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self._raw = {key: value for key, value in raw.items() if value is not None}

    def integer(self, key: str, default: int | None = None, *, least: int = 1, most: int | None = None) -> int:
        """An integer of at least `least`. Without a default the key must be there."""
        value = self._raw.get(key, default)
        if value is None:
            raise CheckpointError(f"config.json: {key} is missing")
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise CheckpointError(f"config.json: {key} must be an integer >= {least}, not {shorten(value)}")
        if most is not None and value > most:
            raise CheckpointError(f"config.json: {key} {value} is over {most}")
        return value

    def number(self, key: str, default: float) -> float:
        """A finite number above 0."""
        return self._number(key, self._raw.get(key, default))

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._raw.get(key, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"config.json: {key} must be true or false, not {shorten(value)}")
        return value

    def only(self, key: str, *built: Any, why: str | None = None) -> None:
        """The key has one of the values `built`, by type too (0 is not false); absent, it has the first one."""
        value = self._raw.get(key, built[0])
        if not any(type(value) is type(allowed) and value == allowed for allowed in built):
            raise CheckpointError(
                f"config.json: {key} = {shorten(value)} is not served: {why or f'only {built[0]!r} is built'}"
            )

    def full_attention(self, num_layers: int) -> None:
        """No layer attends to a window only."""
        self.only("use_sliding_window", False)
        self.only("layer_types", ["full_attention"] * num_layers, why="only full_attention in every layer is built")

    def rope_theta(self, default: float = 10000.0) -> float:
        """The base of the rotary positions, which must be of the plain kind."""
        return self._number("rope_theta", self._rope("rope_theta", default))

    def rotary_dim(self, head_dim: int, default_factor: float) -> int:
        """head_dim x partial_rotary_factor."""
        factor = self._number("partial_rotary_factor", self._rope("partial_rotary_factor", default_factor))
        rotary_dim = int(head_dim * factor)
        check(factor <= 1, f"partial_rotary_factor {factor} is over 1")
        check(
            rotary_dim >= 2 and rotary_dim % 2 == 0,
            f"head_dim {head_dim} x partial_rotary_factor {factor} is no even number >= 2",
        )
        told = self._raw.get("rotary_dim", rotary_dim)
        check(told == rotary_dim, f"rotary_dim {shorten(told)} is not head_dim x partial_rotary_factor, {rotary_dim}")
        return rotary_dim

    def _number(self, key: str, value: Any) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value < math.inf:
            raise CheckpointError(f"config.json: {key} must be a positive number, not {shorten(value)}")
        return value  # type: ignore[no-any-return]

    def _rope(self, key: str, default: float) -> Any:
        """A key of its own, or one of `rope_parameters` (in transformers 5) or `rope_scaling` (before)."""
        value = self._raw.get(key, default)
        for name in ("rope_scaling", "rope_parameters"):
            parameters = self._raw.get(name, {})
            known = {"rope_type": "default", "type": "default"}
            plain = ("rope_theta", "partial_rotary_factor")
            for part, said in parameters.items() if isinstance(parameters, dict) else [("", parameters)]:
                if said is not None and part not in plain and known.get(part) != said:
                    raise CheckpointError(
                        f"config.json: {name} = {shorten(parameters)} is not served: scaled rotary positions are not "
                        f"built{f', so {part} = {shorten(said)} may not be there' if part else ''}"
                    )
            value = value if not parameters or parameters.get(key) is None else parameters[key]
        return value


def check(holds: bool, fault: str) -> None:
    """Raises CheckpointError with `fault` unless it holds."""
    if not holds:
        raise CheckpointError(f"config.json: {fault}")


def check_heads(num_heads: int, num_kv_heads: int, head_dim: int, hidden_size: int) -> None:
    """Sizes of heads that go together."""
    check(
        num_heads % num_kv_heads == 0,
        f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}",
    )
    check(head_dim >= 1, f"hidden_size {hidden_size} is smaller than num_attention_heads {num_heads}")
