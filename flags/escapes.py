r"""New lines and tabs in the texts of flags: a shell hands over \n as two characters.

\n is a new line and \t a tab, except where they begin a command of LaTeX (\neq, \times). A doubled
backslash before a letter is one backslash: \\n stays \n.
"""

import re

# Commands of LaTeX, its packages of the AMS among them, that begin like \n or \t. Not \ni, \the,
# \tt and \tie: "\ni have" and "\the end" are rather a new line and a tab.
LATEX = frozenset(
    """
    nabla natural ncong ne nearrow neg neq newcommand newline newpage nexists ngeq ngeqq ngeqslant
    ngtr ngtrless nleftarrow nLeftarrow nleftrightarrow nLeftrightarrow nleq nleqq nleqslant nless
    nmid nobreak noindent nolimits nonumber norm normalfont normalsize not notag notin nparallel
    nprec npreceq nrightarrow nRightarrow nshortmid nshortparallel nsim nsubset nsubseteq nsucc
    nsucceq nsupset nsupseteq ntriangleleft ntrianglelefteq ntriangleright ntrianglerighteq nu
    num numberline nvdash nvDash nVdash nVDash nwarrow
    tabcolsep tabular tag tan tanh tau tbinom tcfrac tensor tfrac therefore thetasym theta
    thickapprox thicksim thickspace thinspace tilde times tiny to top triangle triangledown
    triangleleft trianglelefteq triangleq triangleright trianglerighteq twoheadleftarrow
    twoheadrightarrow tr
    text textbf textbackslash textcolor textdegree textit textmd textnormal textrm textsc textsf
    textsl textstyle textsubscript textsuperscript texttt textup thispagestyle title today
    """.split()
)
MARKED = re.compile(r"\\\\(?=[a-zA-Z])|\\([nt])([a-zA-Z]*)")


def unescape(text: str) -> str:
    r"""The text with new lines and tabs for \n and \t; commands of LaTeX stay as they are."""

    def plain(found: re.Match) -> str:
        letter, rest = found.groups()
        if letter is None:
            return "\\"
        if letter + rest in LATEX:
            return found[0]
        return {"n": "\n", "t": "\t"}[letter] + rest

    return MARKED.sub(plain, text)
