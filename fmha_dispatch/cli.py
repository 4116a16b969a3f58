"""The command ``fmha-dispatch``: parsing, logging, exit codes. Each command is a module of its own."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from fmha_dispatch.console import silence_stdout
from fmha_dispatch.errors import ExitCode, FmhaError, InvalidArgument
from fmha_dispatch.settings import VARIABLES, Settings, redact_text

# Name -> module with add_arguments(parser) and run(args) -> exit code, and one line of help. A module is imported when
# its command is asked for, so that no command pays for another's imports.
COMMANDS = {
    "demo": ("fmha_dispatch.demo", "run the main job on the two reference models"),
    "explain": ("fmha_dispatch.explain", "which kernel a decode call gets, and why no other"),
    "replay": ("fmha_dispatch.replay", "decide recorded trtllm-gen calls again, without GPU or cubins"),
    "fetch": ("fmha_dispatch.store_commands.fetch", "make cubins available on this machine"),
    "verify": ("fmha_dispatch.store_commands.verify", "check the bytes of every cubin against the lock"),
    "status": ("fmha_dispatch.store_commands.status", "versions, layers, what is present, driver and GPUs"),
}

_MEANING = {
    ExitCode.OK: "ok",
    ExitCode.USER: "user error: arguments, settings, a request that no kernel takes",
    ExitCode.BUG: "bug in fmha-dispatch, or a wrong result",
    ExitCode.MISSING_OFFLINE: "cubins are missing and may not be fetched",
    ExitCode.INTEGRITY: "bytes differ from the lock",
    ExitCode.NETWORK: "the network did not deliver",
    ExitCode.DISK: "disk or permission",
    ExitCode.DEVICE: "device or driver",
    ExitCode.LOCK: "cubins.lock is invalid",
    ExitCode.INTERRUPTED: "interrupted",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """A wrong command line is the user's error, reported like any other; argparse's own code 2 means a bug here."""
        self.print_usage(sys.stderr)
        raise InvalidArgument(redact_text(message), fix=f"{self.prog} --help")


def build_parser(command: str | None) -> argparse.ArgumentParser:
    """The parser, with the options of `command` alone."""
    codes = "\n".join(f"  {int(code):3}  {meaning}" for code, meaning in _MEANING.items())
    variables = "\n".join(f"  {name:27} {meaning}" for name, (_, _, meaning) in VARIABLES.items())
    epilog = f"exit codes:\n{codes}\n\nenvironment:\n{variables}"
    parser = _Parser(
        prog="fmha-dispatch",
        description="Prebuilt attention kernels: found, verified, selected, launched.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module, summary) in COMMANDS.items():
        sub = subparsers.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            epilog=f"exit codes:\n{codes}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.add_argument("--json", action="store_true", help="print one JSON document")
        if name == command:
            importlib.import_module(module).add_arguments(sub)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; the exit code. Never raises, except for the exit of ``--help``."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = next((word for word in arguments if not word.startswith("-")), None)
    wants_json = "--json" in arguments
    try:
        args = build_parser(command).parse_args(arguments)
        wants_json = args.json  # argparse takes abbreviations
        args.settings = Settings.from_environment()
        _log_to_stderr(args.settings.log_level)
        code = int(importlib.import_module(COMMANDS[args.command][0]).run(args))
        sys.stdout.flush()
        return code
    except FmhaError as error:
        _report(error.to_json(), f"error: {error}", wants_json)
        return int(error.exit_code)
    except KeyboardInterrupt:
        _report({"kind": "KeyboardInterrupt", "message": "interrupted"}, "interrupted", wants_json)
        return int(ExitCode.INTERRUPTED)
    except BrokenPipeError:
        silence_stdout()
        return int(ExitCode.OK)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{os.path.basename(place.filename)}:{place.lineno}"
        _report(
            {"kind": type(error).__name__, "message": str(error), "where": where},
            f"bug: {type(error).__name__}: {error} (at {where}; FMHA_DISPATCH_LOG_LEVEL=DEBUG prints the trace)",
            wants_json,
        )
        logging.getLogger("fmha_dispatch").debug("trace", exc_info=True)
        return int(ExitCode.BUG)


def _report(document: dict[str, Any], line: str, wants_json: bool) -> None:
    print(f"fmha-dispatch: {line}", file=sys.stderr)
    if wants_json:
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps({"error": document}, indent=2), flush=True)


def _log_to_stderr(level: str) -> None:
    """The command owns its process's logging; the library never configures any."""
    logger = logging.getLogger("fmha_dispatch")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("fmha-dispatch: %(levelname)s: %(message)s"))
        logger.addHandler(handler)
    logger.setLevel(level)


if __name__ == "__main__":
    sys.exit(main())
