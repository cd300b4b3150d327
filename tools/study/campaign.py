"""A campaign: candidates one after the other, each against the best so far, all keeps under one error
rate. ablate.py --campaign has the flags, tools/study/online.py the rule, tools/study/gates.py what a
candidate must pass first; here are the folder, its log and the order of events.

Candidate k is compared on the seeds 1000 k, 1000 k + 1, ..., which nothing else uses, so no answer
can be learned by heart. Seeds below 1000 are held out for --final.
"""

import hashlib
import math
import os
import shlex
from pathlib import Path

import torch

from tools.study import gates
from tools.study.campaign_folder import (
    OWN,
    append,
    best_of,
    by_number,
    code_key,
    copy_code,
    cost_of,
    events_of,
    kept_of,
    open_submission,
    path_of_best,
    read_log,
    sha256_of,
    variant_of,
)
from tools.study.online import decide, left_after, level_of, plan_of
from tools.study.runs import last_line, run_all
from tools.study.significance import ALPHA, interval
from tools.study.study import (
    APART,
    DEFAULTS,
    FAILED,
    difference,
    folder_of,
    is_finished,
    lines_of,
    metric_of,
)
from tools.study.variants import has_flag, named_variants
from training.metrics import to_json

# exit statuses; 1 is an error, 2 wrong usage, 128 + n a signal
STATUS = {"kept": 0, "state": 0, "final": 0, "dropped": 3, "equal": 4, "refused": 5}
GATE_SEED = APART - 1  # of a candidate's 1000 seeds: of the gates, never of a comparison
METRICS = ("val_loss", "val_bits_per_byte")
# flags of ablate.py that hold for a whole campaign
SETTINGS = {
    "metric": "val_loss",
    "best": "low",
    "max_seeds": None,
    "layouts": "tp=2;dp_shard=2",
    "nproc": 1,
}


class Stopped(Exception):
    """A signal came; the same command goes on."""


# ---------------------------------------------------------------- runs
def study_of(begin: dict, args, variants: dict) -> dict:
    return DEFAULTS | {
        "metric": begin["metric"],
        "best": begin["best"],
        "reach": None,
        "nproc": begin["nproc"],
        "jobs": args.jobs,
        "gpus": args.gpus,
        "only": None,
        "variants": variants,
    }


def make_runs(study: dict, runs_folder: Path, todo: list[tuple], stopping: list) -> None:
    run_all(study, runs_folder, todo, stopping)
    if stopping:
        raise Stopped


def outcome(study: dict, folder: Path, name: str, seed: int) -> float:
    """The number that judges a run; the worst one, inf or -inf, if it died."""
    lines = lines_of(folder, name, seed)
    if not is_finished(lines, study["variants"][name]):
        lines = []
    value = metric_of(lines, study)
    if value is None:
        return math.nan
    return value


def differences(study: dict, folder: Path, seeds: list[int]) -> list[float]:
    """Candidate minus best, of the first seeds with both runs ended."""
    found = []
    for seed in seeds:
        for name in ("candidate", "best"):
            ended = is_finished(lines_of(folder, name, seed), study["variants"][name])
            if not ended and not (folder_of(folder, name, seed) / FAILED).exists():
                return found
        values = [outcome(study, folder, name, seed) for name in ("candidate", "best")]
        found.append(difference(*values))
    return found


# ---------------------------------------------------------------- gates
def refusal(folder, begin: dict, args, best: dict, candidate: dict, stopping: list) -> str:
    """Why a candidate is not compared; "equal" if it computes what the best computes; "" if it may
    be compared. folder: of the candidate."""
    found = gates.other_question(best, candidate) or gates.judges_itself(best, candidate)
    if found:
        return found
    if gates.is_equal_code(best, candidate):
        return "equal"
    found = runs_and_agrees(folder, begin, args, candidate, stopping)
    if found:
        return found
    seed = seeds_from(folder) + GATE_SEED
    exchanged = candidate | {
        "file": str(OWN / "tools/study/poisoned.py"),
        "flags": [candidate["file"], *candidate["flags"]],
    }
    variants = {"best": best, "candidate": candidate, "exchanged": exchanged}
    study = study_of(begin, args, variants)
    runs_folder = Path(folder, "runs")
    make_runs(study, runs_folder, [(name, seed) for name in variants], stopping)
    for name in ("candidate", "exchanged"):
        failed = folder_of(runs_folder, name, seed) / FAILED
        if failed.exists():
            return f"does not run: {failed.read_text()}"
    if (folder_of(runs_folder, "best", seed) / FAILED).exists():
        raise OSError(f"the best has failed: {last_line(folder_of(runs_folder, 'best', seed))}")
    found = gates.other_text(runs_folder, seed) or gates.reads_validation(runs_folder, seed)
    if not found and gates.is_equal_training(runs_folder, seed):
        return "equal"
    return found


def runs_and_agrees(folder, begin: dict, args, variant: dict, stopping: list) -> str:
    """One step, then --check_parity on the layouts of the campaign."""
    seed = seeds_from(folder) + GATE_SEED
    short = variant | {"flags": [*variant["flags"], "--steps=1"], "steps": 1}
    study = study_of(begin, args, {"one_step": short})
    runs_folder = Path(folder, "runs")
    make_runs(study, runs_folder, [("one_step", seed)], stopping)
    failed = folder_of(runs_folder, "one_step", seed) / FAILED
    if failed.exists():
        return f"does not run: {failed.read_text()}"
    found = gates.parity_fails(variant, begin["layouts"])
    if stopping:
        raise Stopped
    return found


def seeds_from(folder) -> int:
    """The first of the seeds of a candidate, by the number in its folder's name."""
    return APART * int(Path(folder).name)


# ---------------------------------------------------------------- events
def check_new(folder, args) -> None:
    """Refuse a command line that cannot begin a campaign, before the folder is made."""
    if read_log(folder):
        return
    if len(args.recipes) != 1:
        raise ValueError(
            f"{folder} has no campaign: begin one with python ablate.py RECIPE FLAGS --campaign "
            f"{folder}"
        )
    if args.metric not in METRICS:
        raise ValueError(
            f"--metric {args.metric}: a campaign judges by {' or '.join(METRICS)}, which a "
            "candidate cannot log as it likes"
        )
    if not Path(args.recipes[0]).is_file():
        raise ValueError(f"recipe {args.recipes[0]} is no file")


def begin_campaign(folder, args, common: list[str], stopping: list) -> dict:
    """The first event. The start must run, and be equal on the layouts, or no candidate could."""
    recipe = Path(args.recipes[0])
    place = Path(folder, "candidates", "0000")
    file = copy_code(recipe, place / "code")
    begin = {"event": "begin", "candidate": 0, "name": recipe.stem, "recipe": str(recipe)}
    begin |= {"file": file, "flags": common}
    for name in SETTINGS:
        begin[name] = getattr(args, name)
    variant = variant_of(folder, begin, begin["nproc"])
    if not variant["val_every"]:
        raise ValueError("a campaign judges by the validation: give --val_every")
    begin |= {"steps": variant["steps"], "val_every": variant["val_every"]}
    if not variant["tokens"]:
        raise ValueError(f"{recipe}: a campaign needs a recipe that trains on tokens, train_*.py")
    is_on_cpu = "--device cpu" in " ".join(common).replace("=", " ")
    if torch.cuda.is_available() and not is_on_cpu and "--deterministic" not in common:
        raise ValueError(
            "a campaign compares runs to the bit, which GPUs keep with --deterministic only: add it"
        )
    found = runs_and_agrees(place, begin, args, variant, stopping)
    if found:
        raise ValueError(f"{recipe} does not pass the gates itself: {found}")
    return append(folder, **begin)


def submit(folder, log: list[dict], begin: dict, recipe: Path | None, name: str, flags: list):
    """(the submission to judge, None), or (None, the answer that the same candidate got before).
    recipe: None for the best's. flags: added to the best's."""
    best = by_number(log, best_of(log))
    if recipe is None:
        recipe = Path(folder, "candidates", f"{best['candidate']:04}", "code", best["file"])
    if not recipe.is_file():
        raise ValueError(f"--candidate {recipe} is no file")
    try:
        key = code_key(recipe, [*best["flags"], *flags])
    except SyntaxError:  # the gates say what is wrong
        key = hashlib.sha256(recipe.read_bytes()).hexdigest()[:16]
    waiting = open_submission(log)
    if waiting:
        if waiting["key"] == key:
            return waiting, None
        raise ValueError(
            f"candidate {waiting['candidate']}, {waiting['name']}, is under way: python ablate.py "
            f"--campaign {folder} goes on with it"
        )
    for earlier in events_of(log, "submit"):
        if earlier["key"] == key and earlier["against"] == best["candidate"]:
            for answer in events_of(log, "answer"):
                if answer["candidate"] != earlier["candidate"]:
                    continue
                # what did not run may have met a full disk: tried once more
                if answer["verdict"] == "refused" and answer["why"].startswith("does not run"):
                    continue
                return None, answer
    number = len(events_of(log, "submit")) + 1
    place = Path(folder, "candidates", f"{number:04}")
    file = copy_code(recipe, place / "code")
    event = append(
        folder,
        event="submit",
        candidate=number,
        name=name or recipe.stem,
        file=file,
        flags=[*best["flags"], *flags],
        against=best["candidate"],
        key=key,
    )
    return event, None


def judge(folder, begin: dict, submission: dict, args, stopping: list) -> dict:
    """Gates, then the comparison; appends the answer to the log, and returns it."""
    log = read_log(folder)
    number = submission["candidate"]
    place = Path(folder, "candidates", f"{number:04}")
    best = variant_of(folder, by_number(log, submission["against"]), begin["nproc"])
    tests = {test["candidate"]: test for test in events_of(log, "test")}
    if number not in tests:
        try:
            candidate = variant_of(folder, submission, begin["nproc"])
            found = refusal(place, begin, args, best, candidate, stopping)
        except (SyntaxError, ValueError) as error:  # of the candidate's own command line
            found = f"does not run: {error}"
        if found:
            verdict = "equal" if found == "equal" else "refused"
            why = found
            if verdict == "equal":
                why = "the same code, or the same numbers to the bit in a run of full length"
            return append(folder, **answer_to(folder, submission, {"verdict": verdict, "why": why}))
        spent = 1 + max((test["test"] for test in tests.values()), default=0)
        alpha = level_of(spent, kept_of(log))
        plan = plan_of(alpha, begin["max_seeds"])
        append(folder, event="test", candidate=number, test=spent, alpha=alpha, pairs=plan.most)
    candidate = variant_of(folder, submission, begin["nproc"])
    found = compare_candidate(place, begin, args, {"best": best, "candidate": candidate}, stopping)
    return append(folder, **answer_to(folder, submission, found))


def compare_candidate(place: Path, begin: dict, args, variants: dict, stopping: list) -> dict:
    """The verdict of a comparison, with as many pairs as its plan needs."""
    study = study_of(begin, args, variants)
    runs_folder = Path(place, "runs")
    at_once = max(1, args.jobs // 2)
    while True:
        found = decision_of(place, begin, study)
        if found["verdict"]:
            return found
        # the same number of pairs more as runs fit at once; an odd one out waits for the next round
        seeds = seeds_of_pairs(place)[: found["pairs_made"] + at_once]
        todo = [(name, seed) for seed in seeds for name in ("best", "candidate")]
        make_runs(study, runs_folder, todo, stopping)


def decision_of(place: Path, begin: dict, study: dict) -> dict:
    """The verdict, from the log and the runs alone."""
    [test] = [
        event
        for event in read_log(place.parents[1])
        if event["event"] == "test" and event["candidate"] == int(place.name)
    ]
    d = differences(study, place / "runs", seeds_of_pairs(place)[: test["pairs"]])
    if any(math.isnan(value) for value in d):
        raise ValueError(f"{place}: a run has no {begin['metric']}")
    sign = 1
    if begin["best"] == "high":
        sign = -1
    found = decide(d, plan_of(test["alpha"], begin["max_seeds"]), sign)
    counted = d[: found.pairs]
    mean = None
    if counted:
        mean = to_json(sum(counted) / len(counted))
    return {
        "verdict": found.verdict,
        "why": found.why,
        "difference": mean,
        "low": to_json(found.low),
        "high": to_json(found.high),
        "level": found.level,
        "pairs": found.pairs,
        "pairs_made": len(d),
        "test": test["test"],
        "alpha": test["alpha"],
    }


def seeds_of_pairs(place: Path) -> list[int]:
    first = seeds_from(place)
    return list(range(first, first + GATE_SEED))


def answer_to(folder, submission: dict, found: dict) -> dict:
    """The answer to a candidate: what the log keeps, and stdout tells."""
    log = read_log(folder)
    tests = [test["test"] for test in events_of(log, "test")]
    kept = kept_of(log) + (found["verdict"] == "kept")
    best = best_of(log)
    if found["verdict"] == "kept":
        best = submission["candidate"]
    done = max(tests, default=0)
    number = f"{submission['candidate']:04}"
    return {
        "event": "answer",
        "candidate": submission["candidate"],
        "name": submission["name"],
        **found,
        "best": path_of_best(folder, log, best),
        "kept": kept,
        "alpha_next": level_of(done + 1, kept),
        "alpha_left": left_after(done),
        "cost": cost_of(Path(folder, "candidates", number)),
        "cost_so_far": cost_of(Path(folder, "candidates")),
    }


def answer(folder, args, common: list[str], stopping: list) -> dict:
    """What one command of a campaign says: the answer to a candidate, the last judgment, or where
    the campaign stands. Raises ValueError for a command line that does not fit the campaign."""
    begin = begun(folder, args, common, stopping)
    log = read_log(folder)
    if args.final:
        return judge_final(folder, begin, log, args, stopping)
    submission = open_submission(log)
    if args.candidate or args.variant:
        if events_of(log, "final_begin"):
            raise ValueError(f"{folder} has had its last judgment; begin another campaign")
        name, flags = named_flags(args.variant)
        recipe = None
        if args.candidate:
            recipe = Path(args.candidate)
        submission, earlier = submit(folder, log, begin, recipe, name, flags)
        if earlier:
            return earlier | {"repeated": True}
    if submission:
        return judge(folder, begin, submission, args, stopping)
    return state_of(folder, begin, log, args)


def begun(folder, args, common: list[str], stopping: list) -> dict:
    """The begin event of a campaign, new or as it was typed before."""
    for begin in events_of(read_log(folder), "begin"):
        is_other = args.recipes and args.recipes != [begin["recipe"]]
        if is_other or common and common != begin["flags"]:
            typed = shlex.join([begin["recipe"], *begin["flags"]])
            raise ValueError(f"{folder} was begun with {typed}: leave out the recipe and its flags")
        for name, usual in SETTINGS.items():
            if getattr(args, name) not in (usual, begin[name]):
                raise ValueError(f"{folder} was begun with --{name} {begin[name]}; leave it out")
        return begin
    return begin_campaign(folder, args, common, stopping)


def named_flags(items: list[str]) -> tuple[str, list[str]]:
    """(name, flags) of --variant "NAME: FLAGS"; ("", []) without."""
    if len(items) > 1:
        raise ValueError("--campaign compares one candidate at a time: give a single --variant")
    for name, recipe, flags in named_variants(items, [""]):
        if recipe:
            raise ValueError(f"--variant {items[0]!r}: give the recipe as --candidate {recipe}")
        for flag in ("seed", "data_seed", "out"):
            if has_flag(flags, flag):
                raise ValueError(f"--variant: ablate.py sets --{flag} of every run; leave it out")
        return name, flags
    return "", []


# ---------------------------------------------------------------- the end, and the whole
def judge_final(folder, begin: dict, log: list[dict], args, stopping: list) -> dict:
    """The last best against the start, on seeds and a text that nothing was chosen by. Once."""
    text = os.path.realpath(args.final)
    number = best_of(log)
    best = variant_of(folder, by_number(log, number), begin["nproc"])
    if not number:
        raise ValueError("nothing was kept, so there is nothing to judge")
    if not os.path.exists(text):
        raise ValueError(f"--final {args.final} is no file or folder")
    if text in (os.path.realpath(best["data"]), os.path.realpath(best["val_data"] or "-")):
        raise ValueError(f"--final {args.final}: candidates were chosen by this text; give another")
    sha = sha256_of(text)
    for event in events_of(log, "final"):
        raise ValueError(
            f"{folder} was judged before, once and for all: difference {event['difference']:.4g}"
        )
    for event in events_of(log, "final_begin"):
        if (event["sha256"], event["pairs"]) != (sha, args.seeds):
            raise ValueError(
                f"the last judgment of {folder} began with {event['text']} and --seeds "
                f"{event['pairs']}; type these again"
            )
        break
    else:
        append(folder, event="final_begin", text=text, sha256=sha, pairs=args.seeds, best=number)
    variants = {"best": variant_of(folder, by_number(log, 0), begin["nproc"]), "candidate": best}
    for name, variant in variants.items():
        variants[name] = variant | {"flags": [*variant["flags"], f"--val_data={text}"]}
    study = study_of(begin, args, variants)
    seeds = list(range(args.seeds))
    todo = [(name, seed) for seed in seeds for name in variants]
    make_runs(study, Path(folder, "final"), todo, stopping)
    d = differences(study, Path(folder, "final"), seeds)
    low, high, level = interval(d, ALPHA, [[len(d), 1.0]])
    return append(
        folder,
        event="final",
        verdict="final",
        difference=to_json(sum(d) / len(d)),
        low=to_json(low),
        high=to_json(high),
        level=level,
        pairs=len(d),
        best=path_of_best(folder, log, number),
        kept=kept_of(log),
        cost=cost_of(Path(folder, "final")),
        cost_so_far=cost_of(folder),
    )


def state_of(folder, begin: dict, log: list[dict], args) -> dict:
    """Where a campaign stands. Every verdict is computed again from log and runs; "differing": the
    candidates whose verdict the folder does not bear out."""
    differing = []
    answers = events_of(log, "answer")
    for answer in answers:
        if "test" not in answer:
            continue
        place = Path(folder, "candidates", f"{answer['candidate']:04}")
        steps = {"steps": begin["steps"], "val_every": begin["val_every"]}
        study = study_of(begin, args, {"best": steps, "candidate": steps})
        again = decision_of(place, begin, study)
        if any(again[key] != answer[key] for key in ("verdict", "difference", "pairs")):
            differing.append(answer["candidate"])
    verdicts = [answer["verdict"] for answer in answers]
    tests = events_of(log, "test")
    return {
        "verdict": "state",
        "candidates": len(events_of(log, "submit")),
        **{kind: verdicts.count(kind) for kind in ("kept", "dropped", "equal", "refused")},
        "best": path_of_best(folder, log, best_of(log)),
        "best_flags": by_number(log, best_of(log))["flags"],
        "alpha_next": level_of(len(tests) + 1, kept_of(log)),
        "alpha_left": left_after(len(tests)),
        "differing": differing,
        "cost_so_far": cost_of(folder),
    }
