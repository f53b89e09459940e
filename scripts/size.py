"""Counts production lines: no blank lines, no comments, nothing below `#[cfg(test)]` modules or in test files.

Prints each file over 500 and each function over 70 such lines and ends with 1 when there is one.
"""

import pathlib
import re
import sys

FILE_MAX, FUNCTION_MAX = 500, 70
ROOTS = ["src", "cluster", "kv", "actors", "gateway", "bench"]
FUNCTION = re.compile(r"^(\s*)(?:pub(?:\([^)]*\))?\s+)?(?:const\s+)?(?:async\s+)?(?:unsafe\s+)?(?:extern\s+\"C\"\s+)?fn\s+(\w+)")


def production(path):
    """The lines of a file that count, with their numbers; a test module ends the file or is skipped by its braces."""
    lines, skip_indent, pending = [], None, False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        text = line.strip()
        indent = len(line) - len(line.lstrip())
        if skip_indent is not None:
            if text.startswith("}") and indent <= skip_indent:
                skip_indent = None
            continue
        if text.startswith("#[cfg(test)]"):
            pending = True
            continue
        if pending and text and not text.startswith("#["):
            pending = False
            if text.endswith("{"):
                skip_indent = indent
            continue
        if text and not text.startswith("//"):
            lines.append((number, line))
    return lines


def functions(lines):
    """(name, first line, length) of every function, by the indent of its closing brace."""
    for at, (number, line) in enumerate(lines):
        found = FUNCTION.match(line)
        if not found:
            continue
        indent = found.group(1)
        for length, (_, later) in enumerate(lines[at:], 1):
            if later.startswith(indent + "}") or (length == 1 and later.rstrip().endswith((";", "}"))):
                yield found.group(2), number, length
                break
            if later.startswith(indent) and later.rstrip().endswith(";") and not later[len(indent) :].startswith(" ") and length > 1:
                break


def main():
    wrong = []
    for root in ROOTS:
        for path in sorted(pathlib.Path(root).rglob("*.rs")):
            if path.name in ("tests.rs", "test_support.rs") or "tests" in path.parts or "target" in path.parts:
                continue
            lines = production(path)
            if len(lines) > FILE_MAX:
                wrong.append(f"{path}: {len(lines)} production lines, at most {FILE_MAX}")
            wrong += [
                f"{path}:{number}: function {name} has {length} lines, at most {FUNCTION_MAX}"
                for name, number, length in functions(lines)
                if length > FUNCTION_MAX
            ]
    print("\n".join(wrong) or "sizes are within bounds")
    return 1 if wrong else 0


sys.exit(main())
