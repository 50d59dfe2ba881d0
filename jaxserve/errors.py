"""What the user gave is wrong: the one exception that means it, and how a failed validation is told."""

import difflib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError


class InputError(ValueError):
    """Bad input, told in one sentence: what is wrong, where (file, row, column or field path), and what to do.

    The command line prints the sentence and exits with code 2; it never shows a traceback for it.
    """


SENTENCES = {
    "missing": "this field is missing",
    "greater_than": "must be above {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than": "must be below {lt:g}",
    "less_than_equal": "must be at most {le:g}",
    "finite_number": "must be a finite number",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be text in quotes",
    "string_unicode": "must be valid UTF-8 text",
    "string_too_short": "must not be empty",
    "string_too_long": "must have at most {max_length} characters",
    "string_pattern_mismatch": "must not be empty nor hold slashes or control characters",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "too_short": "must have at least {min_length} entry",
    "dict_type": "must be a table of name = value",
    "model_type": "must be a table of name = value",
    "model_attributes_type": "must be a table of name = value",
    "literal_error": "must be {expected}",
    "union_tag_invalid": "must be one of {expected_tags}",
    "union_tag_not_found": "this field is missing",
}
"""Our words, by pydantic's type of error: its own speak of inputs, dictionaries and instances."""

LONGEST_SHOWN = 60
"""Characters of a wrong value that are repeated to the user."""


def explain(error: "ValidationError", given: Any, model: "type[BaseModel]", prefix: str = "") -> str:
    """One fault of a failed validation of `given` as `field.path: sentence`, with how many more there are.

    A name that is not known is told first, for it often explains why another is missing. `prefix` is the path of `given` itself.
    """
    errors = error.errors()
    fault: Mapping[str, Any] = min(errors, key=lambda e: e["type"] != "extra_forbidden")
    kind, context, value = fault["type"], fault.get("ctx", {}), fault["input"]
    parts = [prefix] if prefix else []
    parts += _written(fault["loc"], given, absent=kind == "missing")
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        parts.append(context["discriminator"].strip("'"))
        value = context.get("tag")
    if kind == "value_error":
        message = str(context["error"])
    elif kind == "extra_forbidden":
        near = difflib.get_close_matches(str(fault["loc"][-1]), _field_names(model), n=1)
        message = f"there is no such field{f'; did you mean {near[0]}?' if near else '; check the spelling'}"
    else:
        message = SENTENCES.get(kind, "is not valid here").format_map(context)
        if isinstance(value, str | int | float | bool) and not kind.endswith("missing"):
            message = f"{message} (got {_shown(value)})"
    more = f" (and {len(errors) - 1} more fault{'s' if len(errors) > 2 else ''})" if len(errors) > 1 else ""
    return f"{'.'.join(parts)}: {message}{more}" if parts else f"{message}{more}"


def _written(location: Sequence[str | int], given: Any, *, absent: bool) -> list[str]:
    """pydantic's location without the tags of unions, which are no part of the path that the user wrote."""
    parts, node = [], given
    for i, part in enumerate(location):
        last = i == len(location) - 1
        entries: Any = dict(enumerate(node)) if isinstance(node, list | tuple) else node
        if isinstance(entries, Mapping) and part in entries:
            node = entries[part]
        elif not (absent and last):
            continue
        parts.append(str(part))
    return parts


def _field_names(model: "type[BaseModel]") -> list[str]:
    """Every field that the model or a part of it has."""
    schema = model.model_json_schema()
    return sorted({name for part in (schema, *schema.get("$defs", {}).values()) for name in part.get("properties", {})})


def _shown(value: str | int | float | bool) -> str:
    """A wrong value as the user may have written it."""
    try:
        text = str(value).lower() if isinstance(value, bool) else repr(value)
    except ValueError:  # a whole number of more digits than Python writes out
        return "a number of thousands of digits"
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."
