"""Changes that make a plain script a federated one."""

import difflib
import re

MOST_LINES = 5
IMPORT = "import lightning_fed as fed\n"


def federate(source, diff):
    """The script after a change, and with the import before all others if it is needed.

    Args:
        source: The script.
        diff: Lines as in a diff: with `-` those that go, with `+` those that come, with a space those that stay, after
            which others come.

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
    """The change that adds the callback after a line, with further lines of a diff."""
    return "\n".join([f" {after}", f"+    callbacks = [*callbacks, fed.Federation({options})]", *more])


def with_trainer(rounds, options, package="L"):
    """The change that puts a ``FederatedTrainer`` in place of a plain Trainer without other arguments."""
    arguments = "callbacks=callbacks, **options)"
    return (
        f"-    trainer = {package}.Trainer(max_epochs={rounds}, {arguments}\n"
        f"+    trainer = fed.FederatedTrainer(max_rounds={rounds}, {options}, {arguments}"
    )


def changed_lines(before, after):
    """The lines of a diff that are not in both scripts."""
    return [line for line in difflib.ndiff(before.splitlines(), after.splitlines()) if line[0] in "+-"]
