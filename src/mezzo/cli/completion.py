"""`mezzo completion SHELL`: a script that completes commands and their options."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from io import StringIO

from ..errors import ConfigError, did_you_mean
from .main import COMMANDS, main

SHELLS = ("bash", "zsh", "fish")
_SUBCOMMANDS = {"policy": ("show", "ops", "why", "diff"), "completion": SHELLS}
_BASH = """\
_mezzo() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" command="${{COMP_WORDS[1]}}" words=""
    if [ "$COMP_CWORD" -eq 1 ]; then words="{commands} --help --version"; else
        case "$command" in
{cases}
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    [[ "$word" == -* ]] || COMPREPLY+=($(compgen -f -- "$word"))
}}
complete -o filenames -F _mezzo mezzo
"""


def words_after(command: str) -> list[str]:
    """Return what may follow a command: its subcommands, and the options that its help names."""
    subcommands = _SUBCOMMANDS.get(command, ())
    if command == "bench":
        from ..bench import WORKLOADS

        subcommands = (*WORKLOADS, "all")
    asked = [[command, "--help"], *([command, sub, "--help"] for sub in subcommands if command != "completion")]
    options = {option for words in asked for option in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", _printed(words))}
    return [*subcommands, *sorted(options)]


def _printed(words: Sequence[str]) -> str:
    said = StringIO()
    with redirect_stdout(said), redirect_stderr(said), suppress(SystemExit):  # as --help ends
        main(words)
    return said.getvalue()


def script(shell: str) -> str:
    """Return the script that completes `mezzo` in a shell. Raises: ConfigError: another shell than bash, zsh or fish."""
    if shell not in SHELLS:
        raise ConfigError(f"there is no completion for the shell {shell!r}.{did_you_mean(shell, SHELLS)}")
    found = {name: words_after(name) for name in COMMANDS}
    if shell == "fish":
        lines = [f"complete -c mezzo -n __fish_use_subcommand -a {name} -d '{COMMANDS[name].text}'" for name in found]
        for name, words in found.items():
            lines += [f"complete -c mezzo -n '__fish_seen_subcommand_from {name}' -a '{' '.join(words)}'"]
        return "\n".join(lines) + "\n"
    cases = "\n".join(f'            {name}) words="{" ".join(words)}";;' for name, words in found.items())
    head = "autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    return head + _BASH.format(commands=" ".join(COMMANDS), cases=cases)


def run(argv: Sequence[str]) -> int:
    """Run `mezzo completion` with the words after it. Returns: 0 done. Writes: standard output."""
    if argv[:1] in (["-h"], ["--help"]):
        print('usage: mezzo completion bash|zsh|fish\n\nFor bash: eval "$(mezzo completion bash)"')
        return 0
    if len(argv) != 1:
        raise ConfigError(f"{len(argv)} words were given, and a script is for one shell. Valid: {', '.join(SHELLS)}.")
    sys.stdout.write(script(argv[0]))
    return 0
