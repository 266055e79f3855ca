"""Changes from a plain script to a federated script."""

import difflib
import re

MOST_LINES = 5
IMPORT = "import lightning_fed as fed\n"


def federate(source, diff):
    """The changed script, with the import first if needed.

    Args:
        source: The script.
        diff: Lines of a diff: ``-`` removes a line, ``+`` adds a line, a space keeps a line and positions the following
            additions.
    """
    lines, position = source.splitlines(), 0
    for line in diff.strip("\n").splitlines():
        sign, text = line[0], line[1:]
        if sign == "+":
            lines.insert(position, text)
            position += 1
            continue
        assert lines.count(text) == 1, f"{text!r} is in the script {lines.count(text)} times"
        position = lines.index(text) + (sign == " ")
        if sign == "-":
            del lines[position]
    changed = "\n".join(lines) + "\n"
    is_used = re.search(r"(?<!\w)fed\.", changed)
    return re.sub(r"^(?=import|from)", IMPORT, changed, count=1, flags=re.MULTILINE) if is_used else changed


def with_callback(after, options, *more):
    """The change to add the callback after a line, with further diff lines."""
    return "\n".join([f" {after}", f"+    callbacks = [*callbacks, fed.Federation({options})]", *more])


def with_trainer(rounds, options, package="L"):
    """The change from a Trainer without other arguments to a ``FederatedTrainer``."""
    arguments = "callbacks=callbacks, **options)"
    return (
        f"-    trainer = {package}.Trainer(max_epochs={rounds}, {arguments}\n"
        f"+    trainer = fed.FederatedTrainer(max_rounds={rounds}, {options}, {arguments}"
    )


def changed_lines(before, after):
    """Added and removed lines, with signs."""
    return [line for line in difflib.ndiff(before.splitlines(), after.splitlines()) if line[0] in "+-"]
