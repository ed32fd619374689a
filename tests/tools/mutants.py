"""COUNT SEED FILE...: changes random lines of the working folder by rules. Some test has to fail.

A mutant that does not compile does not count. One that is not found is printed as a diff, too."""

import re
import shlex
import subprocess
import sys
from collections import Counter
from difflib import unified_diff
from pathlib import Path
from random import Random

RULES = [
    (r" \+ ", " - "), (r" - ", " + "), (r" \* ", " / "), (r" [/%] ", " * "), (r" [+-]= ", " = "),
    (r" ([<>]) ", r" \1= "), (r" ([<>])= ", r" \1 "), ("==", "!="), ("!=", "=="),
    (r"&&|\band\b", " or "), (r"\|\||\bor\b", " and "), (r"\bnot ", ""), (r"(?<=[ (])!(?=\w)", ""),
    (r"\bif \(", "if (!"), (r"\bif (?!constexpr|[(])", "if not "), (r"\bis None", "is not None"),
    (r"\bis not\b", "is"), ("true", "false"), ("false", "true"), ("True", "False"),
    ("False", "True"), (r"\bmin\(", "max("), (r"\bmax\(", "min("), (r"\.begin\b", ".end"),
    (r"(?<![\w.])\d+(?![\w.])", r"(\g<0> + 1)"), (r"(?<![\w.])[1-9]\d*(?![\w.])", r"(\g<0> - 1)"),
    (r"\.end\b", ".begin"), (r"(?<=\d\.)[0-8]", "9"),
    (r"\b([\w.]+), (?!\1\b)([\w.]+)(?=[,)}\]])", r"\2, \1"),  # two arguments
    (r"^ *[\w.>-]+(\[[^;{}]*\])?(\([^;{}]*\)| [+*|&-]?= [^;{}]*);$", ""),  # a statement of C++
    (r"^( +)\w[\w.]*(\[.*\])?(\(.*\)| [+*|&-]?= .*[^;,{(])$", r"\1pass"),  # and of Python
]  # fmt: skip
# Strings with the docs, comments, and lines of the preprocessor.
NOT_CODE = re.compile(r'"""[\s\S]*?"""|"(?:[^"\\\n]|\\.)*"|//.*|#.*')
FUZZER = "-m tests.tools.fuzz --no-shrink --seed=1 --cases=400"
PYTEST = "-m pytest -x -m 'not slow' tests"
CHECKS = {
    "csrc/cpu": [f"{PYTEST}/ops/test_tiles.py", FUZZER, f"{PYTEST}/ops"],
    "csrc/ops": [f"{PYTEST}/ops/test_gradients.py", f"{PYTEST}/ops", FUZZER],
    "csrc/cuda": [f"{PYTEST}/cuda/test_cuda_{of}.py" for of in ("without_gpu", "recurrence")],
    "lltm_ops": [f"{PYTEST}/modules/test_layer.py", f"{PYTEST}/modules", f"{PYTEST}/ops"],
}


def mutants_of(file):
    """By line, each as the whole text."""
    text, lines = Path(file).read_text(), {}
    code = NOT_CODE.sub(lambda match: re.sub(r"[^\n]", "\0", match[0]), text)
    for pattern, replacement in RULES:
        for match in re.finditer(pattern, code, re.M):
            mutant = text[: match.start()] + match.expand(replacement) + text[match.end() :]
            lines.setdefault(text.count("\n", 0, match.start()), []).append(mutant)
    return [(file, text, mutants) for mutants in lines.values()]


def failure(file):
    """The first command that fails, or takes too long, and what it has printed."""
    for command in ["setup.py build_ext --inplace", *CHECKS[next(filter(file.startswith, CHECKS))]]:
        limited = ["timeout", "--signal=KILL", "15m", sys.executable, *shlex.split(command)]
        ended = subprocess.run(limited, capture_output=True, text=True)
        if ended.returncode != 0:
            return command, ended.stdout + ended.stderr


def main():
    count, seed, *files = sys.argv[1:]
    lines = [line for file in files for line in mutants_of(file)]
    random, score = Random(int(seed)), Counter()
    random.shuffle(lines)
    if failed := failure(files[0]):
        sys.exit("{} fails without a mutant:\n{}".format(*failed))
    while lines and score.total() < int(count):
        file, text, mutants = lines.pop()
        mutant = random.choice(mutants)
        Path(file).write_text(mutant)
        command, printed = failure(file) or ("NOT FOUND", "")
        Path(file).write_text(text)
        if not re.search(": error: |SyntaxError", printed):
            diff = unified_diff(text.splitlines(True), mutant.splitlines(True), file, command, n=0)
            print(*diff, sep="", flush=True)
            score[file.rpartition("/")[0], command != "NOT FOUND"] += 1
    for folder in sorted({folder for folder, _ in score}):
        print(f"{folder}: {score[folder, True]} found, {score[folder, False]} not")


main()
