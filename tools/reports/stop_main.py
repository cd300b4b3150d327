"""Run a recipe's main up to a certain call, to get the objects made by the recipe: the one door
through which a report enters a recipe."""

import os
from collections.abc import Callable
from functools import partial
from types import FunctionType, ModuleType
from typing import Any
from unittest import mock

from storage import resume

# functions of storage/resume.py on --out
LOOKS_AT_RUN = ("check_run", "wait_for_run", "lock_run", "continued_folder")


class Stopped(BaseException):
    """Raised to end a recipe's main early; a BaseException, so that main's own `except Exception`
    lets it pass."""


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """Stand-in for functions without use in a report."""


# Returns a context that neither reads nor locks the folder --out while a recipe's main runs for a
# report
no_earlier_run = partial(mock.patch.multiple, resume, **dict.fromkeys(LOOKS_AT_RUN, do_nothing))


def names_of_loop(main: FunctionType, last: str) -> dict:
    """The names of the file whose main calls `last`: main's own, or of a recipe that main hands over
    to, as forks/train_distill.py hands over to grpo.main."""
    names = main.__globals__
    if last in names:
        return names
    for module in names.values():
        if isinstance(module, ModuleType) and hasattr(module, "main") and hasattr(module, last):
            return vars(module)
    return names


def stop_main(main: FunctionType, cfg: Any, last: str, **stand_ins: Callable) -> tuple[tuple, dict]:
    """Run main(cfg) up to the call of the function `last`; return the call's (args, kwargs).

    last, stand_ins: functions to replace, by their names in the recipe; stand-ins for names unknown
    to the recipe are skipped. Raises ValueError for a recipe without `last`: its main would train.
    """
    names = names_of_loop(main, last)
    if last not in names:
        file = os.path.relpath(main.__code__.co_filename)
        raise ValueError(
            f"a report stops {file} at its call of {last}, and {file} has no {last}: import it by "
            "this name"
        )

    def stop(*args, **kwargs):
        raise Stopped(args, kwargs)

    replaced = dict.fromkeys(LOOKS_AT_RUN, do_nothing) | stand_ins | {last: stop}
    with (
        mock.patch.dict(names, {name: value for name, value in replaced.items() if name in names}),
        no_earlier_run(),
    ):
        try:
            main(cfg)
        except Stopped as stopped:
            return stopped.args
    raise RuntimeError(f"main ended without a call of {last}, which a report needs")
