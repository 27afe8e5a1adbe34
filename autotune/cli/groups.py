"""Groups of commands: ``equitune bench models``, and ``equitune bench CONFIG`` for the group's usual command.

Flags that were commands before (``equitune bench --models``) work for one version: they are put into the present words,
with a line on standard error that says so.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from typing import Any, ClassVar

from typer.core import TyperGroup

from autotune.errors import ConfigError

# Old flags with a value, which is the new command's first argument.
WITH_VALUE = ("--model", "--library", "--older-than")


class Group(TyperGroup):
    """usual: the command of words that name none, and its argument. old: by flags, the command that they mean.

    unread: by command, options with a value that its flags went with, and that said nothing.
    """

    usual: ClassVar[str]
    argument: ClassVar[str] = "CONFIG"
    old: ClassVar[Mapping[str, str]]
    unread: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args:
            others = ", ".join(name for name in self.commands if name != self.usual)
            raise ConfigError(f"{ctx.command_path}: no {self.argument} is given; name one, or a command: {others}")
        return super().parse_args(ctx, self.in_present_words(ctx.command_path, list(args)))

    def in_present_words(self, path: str, words: list[str]) -> list[str]:
        """The words with the command in front; says so if they name it by flags."""
        if words[0] in (*self.commands, "--help", "-h"):
            return words
        for flags, command in self.old.items():
            if all(any(word.partition("=")[0] == flag for word in words) for flag in flags.split()):
                present = [command, *moved_ahead(flags.split(), words, self.unread.get(command, ()))]
                say_present(path, present)
                return present
        return [self.usual, *words]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """The group's help, then that of its usual command."""
        super().format_help(ctx, formatter)
        usual = self.commands[self.usual]
        usual.format_help(usual.make_context(self.usual, [], parent=ctx, resilient_parsing=True), formatter)


def say_present(path: str, words: list[str]) -> None:
    """The present spelling of a command, on standard error."""
    print(f"equitune: note: this is now spelled {path} {shlex.join(words)}", file=sys.stderr)


def moved_ahead(flags: list[str], words: list[str], unread: tuple[str, ...] = ()) -> list[str]:
    """The words without flags and unread options; the values of flags that have one come first."""
    values, rest, left = [], [], iter(words)
    for word in left:
        flag, equals, value = word.partition("=")
        if flag in unread:
            _ = equals or next(left, "")
        elif flag not in flags:
            rest.append(word)
        elif flag in WITH_VALUE:
            values.append(value if equals else next(left, ""))
    return values + rest
