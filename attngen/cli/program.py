"""How the command line fails: one line on stderr, an exit code, no traceback without --debug."""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Any, TextIO

import click

from attngen.errors import AttngenError, nearest

FAILED, USAGE, INTERRUPTED = 1, 2, 130


def debug_option() -> click.Option:
    """`--debug`, which the program and every command take; `Program.main` reads it."""
    return click.Option(
        ["--debug"], is_flag=True, expose_value=False, help="Show the traceback of an error."
    )


class Command(click.Command):
    """A command that takes --debug too, because that is where people write it."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.params.append(debug_option())

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Refuse an option that is given twice, of which click would keep the last."""
        given = self.make_parser(ctx).parse_args(list(args))[2]
        for param in given:
            once = isinstance(param, click.Option) and not (param.multiple or param.is_flag)
            if once and given.count(param) > 1:
                ctx.fail(f"{param.opts[0]} is given twice; keep one")
        return super().parse_args(ctx, args)


class Interrupted(click.ClickException):
    """Ctrl-C, said in one line."""

    exit_code = INTERRUPTED

    def __init__(self, command: str | None) -> None:
        kept = "; measured trials are kept, run the same command to go on"
        super().__init__("interrupted" + (kept if command == "tune" else ""))


class Program(click.Group):
    """The group of all commands; turns every exception into a line and an exit code."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        arguments = list(sys.argv[1:] if args is None else args)

        def run() -> Any:
            return super(Program, self).main(
                arguments, "attngen", complete_var, standalone_mode=False, **extra
            )

        if not standalone_mode:
            return run()
        with warnings.catch_warnings():
            warnings.showwarning = _one_line_warning
            try:
                code = run()
            except Exception as error:
                if "--debug" in arguments:
                    traceback.print_exception(error)
                code = complain(error)
        sys.exit(code if isinstance(code, int) else 0)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Interrupted(ctx.invoked_subcommand) from None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            hint = nearest(args[0], self.commands)
            ctx.fail(f"unknown command {args[0]!r}{hint}; one of {', '.join(self.commands)}")
        return super().resolve_command(ctx, args)


def _one_line_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Stands in for `warnings.showwarning`, which prints two lines of Python."""
    say(f"attngen: warning: {str(message).removeprefix('attngen: ')}")


def complain(error: Exception) -> int:
    """Say in one line on stderr what went wrong; return the exit code."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()
        return USAGE
    if isinstance(error, click.UsageError):
        path = error.ctx.command_path if error.ctx else "attngen"
        message = error.format_message().rstrip(".")
        say(f"{path}: {message}; see '{path} --help'")
        return USAGE
    if isinstance(error, click.ClickException):
        say(f"attngen: {error.format_message()}")
        return error.exit_code
    if isinstance(error, AttngenError):
        say(f"attngen: {error}")
    elif isinstance(error, OSError):
        where = f"{error.filename}; check the path" if error.filename else "in writing the output"
        say(f"attngen: {error.strerror or error}: {where}")
    else:
        say(
            f"attngen: unexpected {type(error).__name__}: {error}; run it again with --debug and "
            "report the traceback"
        )
    return FAILED


def say(message: str) -> None:
    """One line on stderr, whatever line breaks the message holds."""
    click.echo(" | ".join(line.strip() for line in message.splitlines()), err=True)
