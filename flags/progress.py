"""Progress of long work: one line, rewritten on a terminal, elsewhere a line every 30 s; and a model's
text while the model draws more.

with Progress("tokenizing", 12, "files") as progress:
    for file in files:
        ...
        progress(1)
"""

import os
import sys
import threading
import time

from flags.config import own_rank

FIRST = 1.0  # seconds: shorter work shows nothing
EVERY = 0.5  # seconds between two lines on a terminal
EVERY_IN_FILE = 30.0  # and elsewhere: a log file, a pipe
ERASE = "\r\x1b[K"  # to the beginning of the line, and delete it
OPEN: list["Progress"] = []  # work under way, the innermost last
os.register_at_fork(after_in_child=OPEN.clear)  # the threads are the parent's


class Progress:
    """Shows on stderr how much of the work is done, with rate and time left. A thread writes, so the
    line moves also while a single part takes minutes. stdout has results only.

    Call with the size of each finished part. total: 0 if nobody knows it; unit: of `total`, as text;
    scale: how many of them make one; shows: None for rank 0 of a launcher.
    """

    def __init__(
        self, text: str, total: float = 0, unit="", scale: float = 1, shows: bool | None = None
    ):
        self.text = text
        self.total = total
        self.unit = unit
        self.scale = scale
        if shows is None:
            shows = own_rank() == 0
        self.shows = shows
        self.done = 0.0
        self.began = time.monotonic()
        self.ended = threading.Event()
        self.writing = threading.Lock()
        self.thread = threading.Thread(target=self.keep_writing, daemon=True)
        # None: closed by the shell
        self.on_terminal = sys.stderr is not None and sys.stderr.isatty()
        self.has_line = False  # the terminal shows our line

    def start(self):
        if self.shows:
            OPEN.append(self)
            self.thread.start()
        return self

    def stop(self) -> None:
        if self.shows and not self.ended.is_set():
            self.ended.set()
            self.thread.join()
            self.erase()
            OPEN.remove(self)

    def __enter__(self):
        return self.start()

    def __exit__(self, *error):
        self.stop()

    def restart(self, text: str) -> None:
        """Erase the line, because other lines come, and begin another part of the work."""
        with self.writing:
            self.erase()
            self.text = text
            self.done = 0.0
            self.began = time.monotonic()

    def __call__(self, size: float = 1) -> None:
        self.done += size

    def keep_writing(self) -> None:
        pause = EVERY_IN_FILE
        if self.on_terminal:
            pause = FIRST
        while not self.ended.wait(pause):
            if self.on_terminal:
                pause = EVERY
            with self.writing:
                # else a part of the work has a line of its own
                is_innermost = OPEN[-1] is self
                if is_innermost and time.monotonic() - self.began >= FIRST:
                    self.write()

    def write(self) -> None:
        seconds = time.monotonic() - self.began
        unit = (self.unit, self.scale)
        line = describe_progress(self.text, self.done, self.total, seconds, unit)
        self.has_line = self.on_terminal
        if self.on_terminal:
            # the cursor goes back: a line from another part of the program takes our place
            send(f"{ERASE}{line[: columns() - 1]}\r")
        else:
            send(f"{line}\n")

    def erase(self) -> None:
        if self.has_line:
            send(ERASE)
            self.has_line = False

    def say(self, line: str, file=None) -> None:
        """Print a line to stay, above the line of progress. file: None for stdout."""
        with self.writing:
            self.erase()
            if self.shows:
                print(line, file=file, flush=True)


def stop_all() -> None:
    """Erase the line of failed work, before the error is printed."""
    for progress in reversed(list(OPEN)):
        progress.stop()


def send(text: str) -> None:
    """Write to stderr. A closed terminal must not end the work."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        pass


def columns() -> int:
    """Columns of the terminal. A longer line would wrap, and could not be rewritten."""
    try:
        found = os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):
        found = 0
    return found or 80


def describe_progress(
    text: str, done: float, total: float, seconds: float, unit: tuple[str, float]
) -> str:
    """ "verifying step-20: 3.1 of 16.1 GB, 0.8 GB/s, 4 s, 16 s left" """
    name, scale = unit
    parts = []
    if total:
        # ranks with equally long parts may count a few too many
        share = min(done, total) / scale
        parts.append(f"{number(share)} of {number(total / scale)} {name}".rstrip())
    elif done:
        parts.append(f"{number(done / scale)} {name}".rstrip())
    rate = done / scale / max(seconds, 1e-3)
    if rate >= 0.1 and seconds >= 1:
        parts.append(f"{number(rate)} {name}/s")
    parts.append(duration_text(seconds))
    if total and 0 < done <= total:
        parts.append(f"{duration_text(seconds * (total - done) / done)} left")
    return f"{text}: {', '.join(parts)}"


def number(value: float) -> str:
    """Three digits; counts below 100,000 in full."""
    if value == int(value) and value < 1e5:
        return f"{int(value):,}"
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def duration_text(seconds: float) -> str:
    """ "8 s", "2 min 5 s", "1 h 12 min" """
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded} s"
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60} s"
    return f"{rounded // 3600} h {rounded % 3600 // 60} min"


class Stream:
    """Prints texts on stdout during sampling, one below the other: of several rows the first is shown
    while growing, and the next when the first has ended."""

    PAUSE = 0.1  # seconds between two writes: decoding a long text for each token would take time

    def __init__(self, heads: list[str], grows: bool = True):
        self.grows = grows  # False for a pipe: a text is printed once, at its end
        self.heads = heads  # printed before each continuation
        self.said = lambda row, ids: ""  # the text of ids, see continue_texts()
        self.row = 0  # being printed
        self.shown = ""  # of the continuation, so far
        self.has_head = False
        self.ended: set[int] = set()
        self.wrote = 0.0

    def print_new(self, samples: list) -> None:
        if time.monotonic() - self.wrote < self.PAUSE:
            return
        self.wrote = time.monotonic()
        while self.row < len(samples):
            text = self.said(self.row, samples[self.row].ids)
            if self.row in self.ended:
                self.finish(text)
                continue
            if not self.grows:
                return
            # the bytes of a letter may come one by one, and half a letter decodes to U+FFFD
            self.show(text.rstrip("\ufffd"))
            return

    def end_row(self, row: int, ids: list[int], truncated: bool) -> None:
        self.ended.add(row)

    def show(self, text: str) -> None:
        """Print the new part of the continuation. Some tokenizers change the end of a text when more
        comes: then the text waits for its end."""
        if not self.has_head:
            self.has_head = True
            self.write(self.heads[self.row])
        if text.startswith(self.shown):
            self.write(text[len(self.shown) :])
            self.shown = text

    def finish(self, text: str) -> None:
        self.show(text)
        if self.shown != text:  # changed by later tokens: all once more
            self.write(f"\n{self.heads[self.row]}{text}")
        self.write("\n")
        self.row += 1
        self.shown = ""
        self.has_head = False

    def close(self, texts: list[str]) -> None:
        """Print the rest of the texts."""
        for text in texts[self.row :]:
            self.finish(text)

    def write(self, text: str) -> None:
        print(text, end="", flush=True)
