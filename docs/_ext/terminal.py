"""Records a command in a terminal, and writes the printed lines as a moving picture (SVG).

    python docs/_ext/terminal.py docs/assets/terminal.svg "lightning-fed demo --rounds 4"

The picture plays once, faster than the command. With reduced motion a viewer sees all lines at once.
"""

import argparse
import shlex
import subprocess
import time
from html import escape
from pathlib import Path

SECONDS = 12  # length of the picture
CHARACTER, LINE, MARGIN, FONT = 7.25, 17, 14, 12  # pixels


def record(command: str) -> list[tuple[float, str]]:
    """Runs a command, and returns each printed line with the seconds since the start."""
    begin = time.monotonic()
    with subprocess.Popen(shlex.split(command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        lines = [(time.monotonic() - begin, line.rstrip()) for line in process.stdout]
    if process.returncode:
        raise RuntimeError(f"Expected `{command}` to succeed, but got {process.returncode}: {lines[-1:]}")
    if not lines:
        raise RuntimeError(f"Expected `{command}` to print lines, but got no output.")
    return lines


def draw(command: str, lines: list[tuple[float, str]]) -> str:
    """Draws recorded lines below the command. Each line appears at its time, scaled to the picture's length."""
    shown = [(0.0, f"$ {command}"), *lines]
    scale = SECONDS / shown[-1][0]
    width = 2 * MARGIN + CHARACTER * max(len(line) for _, line in shown)
    height = 2 * MARGIN + LINE * len(shown)
    texts = "\n".join(
        f'<text x="{MARGIN}" y="{MARGIN + LINE * (place + 0.75):.0f}" style="animation-delay: {scale * moment:.1f}s">'
        f"{escape(line)}</text>"
        for place, (moment, line) in enumerate(shown)
        if line
    )
    box = f"0 0 {width:.0f} {height}"
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" role="img" aria-labelledby="t">
<title id="t">{escape(command)}, recorded in a terminal</title>
<style>
text {{ font: {FONT}px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; fill: #d8dade; white-space: pre; }}
text:first-of-type {{ fill: #b39ddb; }}
@media (prefers-reduced-motion: no-preference) {{
  text {{ animation: appear 0.1s both; }}
  @keyframes appear {{ from {{ opacity: 0; }} }}
}}
</style>
<rect width="100%" height="100%" rx="8" fill="#16181c"/>
{texts}
</svg>
"""


def main() -> None:
    """Records the command on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="SVG file")
    parser.add_argument("command")
    options = parser.parse_args()
    options.out.write_text(draw(options.command, record(options.command)), encoding="utf-8")


if __name__ == "__main__":
    main()
