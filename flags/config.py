"""Command line and config.json from dataclasses: one field is one flag, the comment after the field
is the flag's --help. Where the comment is too long for the line, it stands above the field.

    @dataclass(kw_only=True)
    class Config(DataConfig, CheckpointConfig):     # inherits the option groups of its modules
        steps: int = 1000                           # optimizer steps   <- `--steps 20`, and the text that --help prints
        compile: bool = True                        # compile blocks    <- `--compile`, `--no-compile`, `--compile false`
    cfg = parse_config(Config)

Field types: int, float, str, bool, Literal[...], list[int], list[str] (comma separated) and `X |
None` (the word none). Every field has a default. A wrong command line ends with status 2 and
exactly one line on stderr, from rank 0 only.

No flag is ignored. A flag with a precondition declares the precondition, and is refused without:

    PIPELINE = Need("without --pp 2 or more", lambda c: c.pp > 1)
        pp_schedule: Schedule = flag("1F1B", PIPELINE)  # order of the micro-batches' forwards and backwards

Only given flags are refused: never a default, and no details of a feature that the user switched
off (`--val_batches 4 --val_every 0` says clearly enough that there is no validation).
"""

import argparse
import copy
import dataclasses
import functools
import inspect
import itertools
import json
import math
import os
import re
import shlex
import socket
import sys
import textwrap
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, NoReturn, get_args, get_origin, get_type_hints

from flags import VERSION
from flags.files import printable, read_json, write_file

if sys.platform == "win32":
    sys.exit(
        "error: nanotitan runs on Linux, on macOS, and on Windows inside WSL2: wsl --install, and "
        "start it there"
    )

FROM_FILE = set()  # names of the fields from --config rather than from a flag


def own_rank(name: str = "RANK") -> int:
    """The rank given by the launcher; 0 without. name: LOCAL_RANK for the rank among the processes
    of this machine."""
    rank = os.environ.get(name, "")
    if rank.isdigit():
        return int(rank)
    return 0


def usage_error(message: str | Exception) -> NoReturn:
    """One line on stderr, then exit status 2. All ranks of a host see the same command line and
    files, so the first speaks."""
    rank = own_rank()
    if rank == 0 or own_rank("LOCAL_RANK") == 0:
        who = ""
        if rank:
            who = f" on rank {rank} ({socket.gethostname()})"
        print(
            f"error{who}:",
            printable(" ".join(str(message).splitlines())),
            file=sys.stderr,
            flush=True,
        )
    else:
        time.sleep(5)  # torchrun kills all ranks once one exits: let rank 0 print first
    raise SystemExit(2)


class Need(NamedTuple):
    """The precondition of a flag's effect."""

    # completes the sentence "--flag value has no effect ...": "without --pp 2 or more", "with
    # --init_from"
    text: str
    # of refusals.collect_facts(): all flags, all fields of the model, and more
    met: Callable[[SimpleNamespace], Any]


GPU = Need("without a GPU", lambda c: c.on_cuda)


def flag(default: Any, *needs: Need, bare: str = "") -> Any:
    """A field of a Config with preconditions: see no_effect. bare: the value of a flag that is
    given without a value."""
    # two Configs must not share a list
    make = functools.partial(copy.copy, default)
    return dataclasses.field(default_factory=make, metadata={"needs": needs, "bare": bare})


def needs_of(Config: type, name: str) -> tuple[Need, ...]:
    """The needs of a flag. A class that only changes the default of an inherited field keeps the
    needs."""
    for group in Config.__mro__:
        if "__dataclass_fields__" not in vars(group):
            continue
        field = group.__dataclass_fields__.get(name)
        if field is not None and "needs" in field.metadata:
            return field.metadata["needs"]
    return ()


def given_flags(cfg: Any) -> dict[str, Any]:
    """{field: value} of the fields that differ from their default."""
    given = {}
    for field in dataclasses.fields(cfg):
        value = getattr(cfg, field.name)
        if value != default_of(field):
            given[field.name] = value
    return given


def unmet_needs(cfg: Any, facts: SimpleNamespace) -> dict[str, Need]:
    """{field: first unmet need} of the fields that differ from their default."""
    unmet = {}
    for name in given_flags(cfg):
        for need in needs_of(type(cfg), name):
            if not need.met(facts):
                unmet[name] = need
                break
    return unmet


def no_effect(cfg: Any, facts: SimpleNamespace) -> list[str]:
    """One sentence per unmet need, with all flags given for nothing. Fields from --config return to
    their default instead, and rank 0 says so.
    """
    returned = [name for name in unmet_needs(cfg, facts) if name in FROM_FILE]
    if returned and own_rank() == 0:
        print(
            f"--config: {', '.join(returned)} without effect here, back to the default", flush=True
        )
    defaults = {
        field.name: default_of(field) for field in dataclasses.fields(cfg) if field.name in returned
    }
    vars(cfg).update(defaults)
    vars(facts).update(defaults)
    sentences = []
    unmet = unmet_needs(cfg, facts)
    for need in dict.fromkeys(unmet.values()):
        names = [spell_flag(name, getattr(cfg, name)) for name in unmet if unmet[name] == need]
        if len(names) == 1:
            sentences.append(f"{names[0]} has no effect {need.text}; leave it out")
        else:
            sentences.append(f"{', '.join(names)} have no effect {need.text}; leave them out")
    return sentences


class PrintVersion(argparse.Action):
    """--version: rank 0 prints the version of the code, and the program ends."""

    def __call__(self, parser, *args):
        if own_rank() == 0:
            print(f"nanotitan {VERSION}")
        parser.exit()


class Parser(argparse.ArgumentParser):
    """argparse, but an error is one line without the usage, flags are not abbreviated, and only
    rank 0 prints the help."""

    def __init__(self, **kwargs):
        super().__init__(
            allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs
        )
        # argparse takes -1e-4 and -inf for flags, but our flags have two dashes
        self._negative_number_matcher = re.compile("-[^-]")
        self.add_argument(
            "--version",
            action=PrintVersion,
            nargs=0,
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )

    def error(self, message: str) -> NoReturn:
        usage_error(message.removeprefix("argument "))

    def print_help(self, file: Any = None) -> None:
        if own_rank() == 0:
            super().print_help(file)


def make_parser(Config: type, kinds: dict) -> tuple[Parser, dict]:
    """(parser, {field: help}). Parsed values stay text; flags not given are absent."""
    helps = {}
    recipe = sys.modules.get(Config.__module__)
    about = (recipe and recipe.__doc__ or "").strip()
    about += "\n--config FILE: start from the config.json of a saved run; other flags override it."
    about += "\n--help NAME: one flag, of today or of earlier versions. --version: of this code."
    parser = Parser(usage=argparse.SUPPRESS, description=about)
    parser.add_argument("--config", help=argparse.SUPPRESS)
    for group, fields in option_groups(Config).items():
        title = f"{group.__module__}.{group.__name__}".removeprefix("__main__.")
        if "TITLE" in vars(group):  # the group's own, not an inherited one
            title = group.TITLE
        section = parser.add_argument_group(title)
        comments = field_comments(group)
        for field in fields:
            name = field.name
            is_bool = kinds[field.name] is bool
            default = spell(default_of(field)) or '""'
            helps[name] = comments.get(name, "")
            notes = [f"default: {default}"]
            options = {}
            bare = field.metadata.get("bare", "")
            if is_bool:
                notes.append(f"--no-{name} turns it off")
                bare = "true"
            if bare:
                options = {"nargs": "?", "const": bare}
            notes += [f"no effect {need.text}" for need in needs_of(Config, name)]
            text = f"{helps[name]} [{'; '.join(notes)}]".replace("%", "%%")
            # a flag of an inherited group that this program always refuses
            if name in getattr(Config, "REFUSED", ()):
                text = argparse.SUPPRESS
            section.add_argument(
                f"--{name}",
                default=argparse.SUPPRESS,
                metavar=describe(kinds[name]),
                help=text,
                **options,
            )
            if is_bool:
                section.add_argument(
                    f"--no-{name}",
                    dest=name,
                    action="store_const",
                    const="false",
                    default=argparse.SUPPRESS,
                    help=argparse.SUPPRESS,
                )
    return parser, helps


def parse_config(Config: type, argv: list[str] | None = None) -> Any:
    """Config from `argv` (default: sys.argv). `--config FILE` is read first, wherever the flag
    stands; other flags win."""
    kinds = get_type_hints(Config)
    parser, helps = make_parser(Config, kinds)
    if argv is None:
        argv = sys.argv[1:]
    asked = flag_after_help(argv)
    if asked:
        explain_flag(asked, parser, helps)
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        from flags.other_names import refuse_word  # only mistakes need the file

        usage_error(refuse_word(unknown[0], kinds, helps))
    given = vars(given)
    values = {}
    file = given.pop("config")
    if file is not None:
        values = read_config(file, helps, kinds)
    for name, text in given.items():
        try:
            values[name] = parse_value(text, kinds[name])
        except (ValueError, KeyError):
            from flags.hints import number_hint  # only mistakes need the file

            hint = number_hint(text, unwrap(kinds[name])[0])
            usage_error(f"--{name} {text!r}: need {describe(kinds[name])}{hint}")
    for field in dataclasses.fields(Config):  # no count is negative, unless the default is -1
        value = values.get(field.name)
        if value is not None and unwrap(kinds[field.name])[0] is int:
            least = 0
            if isinstance(field.default, int):
                least = min(field.default, 0)
            if value < least:
                usage_error(f"--{field.name} {value} must be {least} or more")
            if value >= 2**63:
                usage_error(f"--{field.name} {value} must be below 2**63")
    try:
        cfg = Config(**values)
    except ValueError as error:  # from a __post_init__
        usage_error(error)
    FROM_FILE.clear()
    FROM_FILE.update(values.keys() - given.keys())
    return cfg


def flag_after_help(argv: list[str]) -> str:
    """NAME of `--help NAME` or `--help --NAME`; "" for a mere --help, or without."""
    for word, following in itertools.pairwise(argv):
        if word in ("--help", "-h"):
            return following.lstrip("-").replace("-", "_")
    return ""


def explain_flag(name: str, parser: Parser, helps: dict) -> NoReturn:
    """Print the help of one flag, or why a flag of an earlier version is gone, and end."""
    if name in helps:
        (action,) = [action for action in parser._actions if f"--{name}" in action.option_strings]
        about = (action.help or "").replace("%%", "%")
        text = f"--{name} {action.metavar}\n    {about}"
    else:
        from flags.other_names import refuse_word, tell_gone

        gone = tell_gone(name, helps)
        if not gone:
            usage_error(refuse_word(f"--{name}", {}, helps))
        text = f"--{name} is {gone}"
    if own_rank() == 0:
        print(text)
    raise SystemExit(0)


def check_range(cfg: Any, least: float, most: float, *names: str) -> None:
    """Raise ValueError for the first field outside of [least, most]; None counts as inside."""
    for name in names:
        value = getattr(cfg, name)
        if value is not None and not least <= value <= most:
            limits = f"between {least:g} and {most:g}"
            if most == math.inf:
                limits = f"{least:g} or more"
            raise ValueError(f"--{name} {value} must be {limits}")


def read_config(path: str, helps: dict[str, str], kinds: dict[str, Any]) -> dict:
    """Field values of a saved config.json; unknown keys and wrong values are usage errors. A key of an
    earlier version that was switched off is left out, and rank 0 says so."""
    try:
        saved = {**read_json(path)}
    except OSError as error:
        usage_error(f"--config {path!r}: {error.strerror}; need a config.json that a run has saved")
    except (ValueError, TypeError, RecursionError) as error:
        usage_error(f"--config {path!r}: {error}; need a config.json that a run has saved")
    saved.pop("_run", None)  # facts about the run, by save_config(); not flags
    unknown = [name for name in saved if name not in helps]
    if unknown:
        from flags.other_names import refuse_keys

        wrong = refuse_keys(path, {name: saved[name] for name in unknown}, helps)
        if wrong:
            usage_error(wrong)
        if own_rank() == 0:
            print(f"{path}: without {', '.join(unknown)}, which are gone and were off", flush=True)
        saved = {name: value for name, value in saved.items() if name in helps}
    for name, value in saved.items():
        try:
            saved[name] = parse_value(spell(value), kinds[name])
            # True == 1 in Python
            same_type = isinstance(value, bool) == isinstance(saved[name], bool)
            if not same_type or saved[name] != value not in ("inf", "-inf"):
                raise ValueError
        except (ValueError, KeyError):
            usage_error(f"{path}: {name} = {json.dumps(value)}: need {describe(kinds[name])}")
    return saved


def save_config(cfg: Any, path: str, run: dict) -> None:
    """Write the flags and, under the reserved key "_run", facts that identify the run. --config
    reads the file."""
    flags = dataclasses.asdict(cfg)
    # JSON has no Infinity
    flags |= {k: str(v) for k, v in flags.items() if isinstance(v, float) and math.isinf(v)}
    write_file(path, json.dumps(flags | {"_run": run}, indent=2, allow_nan=False).encode())


def option_groups(Config: type) -> dict:
    """{class: fields}, the recipe's own class first. A subclass may change a default; two groups
    may not share a name."""
    fields = {field.name: field for field in dataclasses.fields(Config)}
    owner = {}
    for group in Config.__mro__:
        for name in inspect.get_annotations(group):
            if name in fields and not issubclass(owner.setdefault(name, group), group):
                raise TypeError(
                    f"{owner[name].__qualname__} and {group.__qualname__} both declare --{name}: "
                    "rename one field"
                )
    groups = {group: [] for group in owner.values()}
    for name, field in fields.items():
        groups[owner[name]].append(field)
    return groups


@functools.cache
def field_comments(group: type) -> dict:
    """{field: the comment at the end of its line, or else the last paragraph of comments above it};
    empty if the source is not at hand (python -c, zipped)."""
    try:
        source = textwrap.dedent(inspect.getsource(group))
    except (OSError, TypeError):
        return {}
    above = dict(re.findall(r"^((?:    # .*\n)+)    (\w+): ", source, re.M))
    found = {name: " ".join(re.findall("# (.*)", text)) for text, name in above.items()}
    # a field may take several lines; the next field or comment ends the search
    return found | dict(re.findall(r"^    (\w+): (?:(?!\n    [\w#@])[^#])*  # (.*)", source, re.M))


def default_of(field: dataclasses.Field) -> Any:
    if field.default_factory is dataclasses.MISSING:
        return field.default
    return field.default_factory()


def unwrap(kind: Any) -> tuple[Any, bool]:
    """(kind without None, whether None is allowed)"""
    inner = [k for k in get_args(kind) if k is not type(None)]
    if type(None) in get_args(kind):
        return inner[0], True
    return kind, False


def describe(kind: Any) -> str:
    """The values of a flag of this kind, for --help and for error lines."""
    kind, optional = unwrap(kind)
    if get_origin(kind) is Literal:
        text = "|".join(map(str, get_args(kind)))
    elif get_origin(kind) is list:
        text = describe(get_args(kind)[0]) + ",..."
    else:
        text = {int: "integer", float: "number", str: "text", bool: "true|false"}[kind]
    return text + "|none" * optional


def parse_value(text: str, kind: Any) -> Any:
    """The value of `text`. Raises ValueError or KeyError if the text has no value of this kind."""
    kind, optional = unwrap(kind)
    if optional and text.lower() == "none":
        return None
    if get_origin(kind) is list:
        if text.strip():
            return [parse_value(item.strip(), get_args(kind)[0]) for item in text.split(",")]
        return []
    if get_origin(kind) is Literal:
        return {str(choice): choice for choice in get_args(kind)}[text]
    if kind is bool:
        return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
    if (
        kind is int
        and re.fullmatch(r"\d+(\.\d+)?[eE]\+?\d{1,2}", text)
        and float(text).is_integer()
    ):
        text = str(int(float(text)))  # 1e3, 2.5e4
    value = kind(text)
    # NaN has no meaning in any flag, and two configs with NaN never compare equal
    if value != value:
        raise ValueError
    return value


def spell(value: Any) -> str:
    """The text of a value: the inverse of parse_value()."""
    if isinstance(value, list):
        return ",".join(map(str, value))
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(value)


def spell_flag(name: str, value: Any) -> str:
    """A flag as typed: --pp_schedule GPipe, --compile, --no-loss_parallel."""
    if isinstance(value, bool):
        if value:
            return f"--{name}"
        return f"--no-{name}"
    return f"--{name} " + (spell(value) or '""')


def say_flags(cfg: Any) -> None:
    """Print the flags that differ from their defaults, as typed, on rank 0."""
    words = []
    for name, value in given_flags(cfg).items():
        if not isinstance(value, bool):
            value = shlex.quote(spell(value))
        words.append(spell_flag(name, value))
    if words and own_rank() == 0:
        print("flags:", " ".join(words), flush=True)


def override_fields(instance: Any, text: str, flag: str) -> Any:
    """A copy of a dataclass instance with the fields of "n_layers=4,dim=512" changed. Raises
    ValueError for a wrong field."""
    kinds = {f.name: get_type_hints(type(instance))[f.name] for f in dataclasses.fields(instance)}
    changes = {}
    for item in filter(None, text.split(",")):
        name, equals, value = (part.strip() for part in item.partition("="))
        if not equals or name not in kinds:
            from flags.other_names import did_you_mean

            wish = did_you_mean(name, dict.fromkeys(kinds, ""), "")
            raise ValueError(
                f"{flag}: {item.strip()!r} is no field=value; {wish}fields are {', '.join(kinds)}"
            )
        try:
            changes[name] = parse_value(value, kinds[name])
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"{flag}: {name} needs {getattr(kinds[name], '__name__', kinds[name])}, not "
                f"{value!r}"
            ) from None
    return dataclasses.replace(instance, **changes)
