"""Converts Arrow values back to the JSON from which they were written.

Arrow gives every struct of a column the union of all fields, with null for missing ones. `datasets` writes differing
dicts, and columns of mixed texts and numbers, as JSON text of the extension type `arrow.json`. Both are undone here. An
original null in a struct cannot be distinguished from a missing field and is dropped, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from posttrain.store import parse_json

if TYPE_CHECKING:
    import pyarrow

# Converts a value of `to_pylist` to JSON types.
Decoder = Callable[[Any], Any]


def decoder_of(kind: pyarrow.DataType) -> Decoder | None:
    """Return the decoder of a type's values to JSON types; None if they need none.

    The decoder raises a ValueError for text that is not valid JSON.
    """
    from pyarrow import BaseExtensionType, types

    if isinstance(kind, BaseExtensionType):
        # Other types arrive as Python values (a UUID, a bool) or as values of their storage type.
        is_json = kind.extension_name == "arrow.json"
        return _unless_null(lambda text: parse_json(text, unique_names=True)) if is_json else None
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return decoder_of(kind.value_type)
    if types.is_struct(kind):
        return _struct_decoder([kind.field(place) for place in range(kind.num_fields)])
    if types.is_map(kind):
        return _unless_null(_map_decoder(decoder_of(kind.item_type)))
    if hasattr(kind, "value_type"):
        item = decoder_of(kind.value_type)
        return _unless_null(lambda values: [item(value) for value in values]) if item else None
    return None


def _unless_null(decode: Decoder) -> Decoder:
    return lambda value: None if value is None else decode(value)


def _struct_decoder(fields: list[pyarrow.Field]) -> Decoder:
    decoders = {field.name: decoder for field in fields if (decoder := decoder_of(field.type))}

    def decode(value: dict[str, Any]) -> dict[str, Any]:
        given = {name: item for name, item in value.items() if item is not None}
        return {name: decoders[name](item) if name in decoders else item for name, item in given.items()}

    return _unless_null(decode)


def _map_decoder(item: Decoder | None) -> Decoder:
    def decode(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
        content = {str(name): item(value) if item else value for name, value in pairs}
        if len(content) < len(pairs):
            raise ValueError("a map has a key twice")
        return content

    return decode
