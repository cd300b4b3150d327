"""Finds blocks that --doc_mask does not change. Only runs with --doc_mask load this file."""

import dis


def blocks_without_attend(model) -> list[str]:
    """Names of the blocks with a forward, of their own or of a module inside, that takes `attend`
    and never reads it."""
    names = []
    for name, block in model.blocks.items():
        if any(map(ignores_attend, block.modules())):
            names.append(f"blocks.{name}")
    return names


def ignores_attend(module) -> bool:
    code = type(module).forward.__code__
    if "attend" not in code.co_varnames[: code.co_argcount]:
        return False
    for step in dis.get_instructions(code):
        if step.opname.startswith("LOAD") and "attend" in str(step.argval):
            return False
    return True
