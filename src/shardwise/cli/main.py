"""The `shardwise` command: the parser, and the exit codes of errors. Each subcommand has a file."""

import argparse
import atexit
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any, NoReturn

from shardwise.cli import check, convert, doctor, evaluate, generate, inspect, launch, plan, report, train, verify
from shardwise.cli.config_file import config_reference
from shardwise.errors import ShardwiseError, did_you_mean
from shardwise.versions import SUPPORTED, __version__, installed

DESCRIPTION = """\
Train any Hugging Face model on many devices. Every split is proved to compute the same numbers as one device.
"""

EXAMPLES = """\
examples:
  shardwise doctor                            is this machine ready?
  shardwise plan path/or/hub-id --layout tp2  what each rank holds
  shardwise verify path/or/hub-id --layout tp2   does the split compute the same numbers?
  shardwise check run.yaml --world-size 64    list every problem of a run before it starts
  shardwise train run.yaml                    train

`shardwise COMMAND --help` explains each command.

exit codes: 0 success; 1 failure, or problems found by check or verify; 2 wrong usage; 130 interrupted (Ctrl-C);
141 output pipe closed; 143 terminated.
"""

COMMANDS: dict[str, tuple[Any, str]] = {
    "train": (train, "train a model from a YAML file"),
    "plan": (plan, "print how a model is split"),
    "check": (check, "list every problem of a run before it starts"),
    "verify": (verify, "prove on a tiny model that a split computes the same numbers"),
    "inspect": (inspect, "describe a checkpoint, and verify its checksums"),
    "evaluate": (evaluate, "measure a model on held-out data"),
    "generate": (generate, "let a model write"),
    "report": (report, "write a page about a run"),
    "convert": (convert, "write a checkpoint's model as a Hugging Face directory"),
    "doctor": (doctor, "check this machine"),
}


class _Parser(argparse.ArgumentParser):
    """argparse whose errors read like ours."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n  fix: see `{self.prog} --help`\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (by default the process's) and returns the exit code."""
    arguments = argparse.Namespace()
    try:
        arguments = _parse(list(sys.argv[1:] if argv is None else argv))
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except ShardwiseError as error:
        if getattr(arguments, "traceback", False):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `shardwise plan ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for buffered output
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        if not launch.is_rank():  # the launcher says it once for all ranks
            print("interrupted; no partly written files were left behind", file=sys.stderr)
        return launch.INTERRUPTED
    return code


def command() -> NoReturn:
    """Runs this process's command line, waits for its threads and exit functions, and ends the process.

    The interpreter's own teardown would take another second to free what torch and transformers imported.
    """
    code = main()
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    launch.leave(code)


def _parse(words: list[str]) -> argparse.Namespace:
    parser, commands = _build_parser(with_keys=not {"-h", "--help"}.isdisjoint(words))
    if words and not words[0].startswith("-") and words[0] not in COMMANDS:
        parser.error(f"unknown command {words[0]!r}{did_you_mean(words[0], COMMANDS)}; there are {', '.join(COMMANDS)}")
    arguments, rest = parser.parse_known_args(words, argparse.Namespace(words=words))
    # argparse takes consecutive positional words only, so overrides after an option are left over.
    if rest and hasattr(arguments, "overrides"):
        arguments.overrides += [word for word in rest if not word.startswith("-")]
        rest = [word for word in rest if word.startswith("-")]
    if rest:
        command = commands[arguments.command]
        options = [option for action in command._actions for option in action.option_strings]
        hint = did_you_mean(rest[0].partition("=")[0], options)
        if not hint and hasattr(arguments, "overrides"):
            hint = "; keys of the run are written key=value, without dashes"
        command.error(f"unknown argument {rest[0]}{hint}")
    return arguments


def _build_parser(*, with_keys: bool) -> tuple[_Parser, dict[str, _Parser]]:
    """The parser, and the commands' parsers; `with_keys` adds the keys of a run to the help, which takes a moment."""
    texts: Any = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    parser = _Parser(prog="shardwise", description=DESCRIPTION, epilog=EXAMPLES, **texts)
    versions = [f"{name} {installed(name)} (tested: {support})" for name, support in SUPPORTED.items()]
    parser.add_argument("--version", action="version", version="\n".join([f"shardwise {__version__}", *versions]))
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)
    commands: dict[str, _Parser] = {}
    for name, (module, summary) in COMMANDS.items():
        keys = config_reference() if with_keys and module is train else None
        commands[name] = subparsers.add_parser(name, help=summary, description=module.HELP, epilog=keys, **texts)
        module.add_arguments(commands[name])
        commands[name].add_argument("--traceback", action="store_true", help="show the traceback of an error")
        commands[name].set_defaults(run=module.run)
    return parser, commands


if __name__ == "__main__":
    command()
