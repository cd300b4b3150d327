"""The content of a message as a list of parts, and chat templates that read such a list."""

from collections.abc import Callable
from contextlib import suppress

# keys and types of a part of a content
PART = ("type", "text", "cache_control")
TEXT_PARTS = ("text", "input_text", "output_text")


def text_of_parts(parts: list) -> str:
    """The text of all parts. Raises an error for a part that is no plain text."""
    for part in parts:
        check_part(part)
    return "".join(part["text"] for part in parts)


def check_part(part: dict) -> None:
    """Raises an error for a part of a content that is no plain text."""
    if not isinstance(part, dict):
        raise TypeError(f"a part of a content is {part!r:.40}, not an object with a text")
    kind = part.get("type", "nameless")
    is_text = kind in (None, "nameless", *TEXT_PARTS)
    if not isinstance(part.get("text"), str) or not is_text:
        raise ValueError(
            f"a part of a content is {kind}, and only text is trained; take such conversations out"
        )
    for key, value in part.items():
        if key not in PART and value not in (None, [], {}):
            raise ValueError(
                f"{key} in a part of a content is unknown, and would be lost; take it out"
            )


def in_parts(messages: list[dict]) -> list[dict]:
    """The messages, with several parts as the list that the file has, in place of one text."""
    found = []
    for message in messages:
        if len(message.get("content_parts", [])) > 1:
            message = message | {"content": message["content_parts"]}
        found.append(message)
    return found


def knows_parts(render: Callable) -> bool:
    """Whether a template reads a content as a list of parts; others would write a Python list."""
    parts = [{"type": "text", "text": "Qone"}, {"type": "text", "text": "Qtwo"}]
    with suppress(ValueError):
        text = render([{"role": "user", "content": parts}], None)
        is_a_list = "'Qone'" in text or '"Qone"' in text
        return "Qone" in text and "Qtwo" in text and not is_a_list
    return False
