"""Where the command ``normmatters`` starts. It stands outside of the package, whose import loads PyTorch."""

import signal

__all__ = ["main"]


def main() -> None:
    """Run the command line. Ctrl-C while PyTorch is being loaded, about a second, ends it without a traceback."""
    heard = signal.getsignal(signal.SIGINT)
    if heard is signal.default_int_handler:  # in the background of a shell it is ignored, and stays so
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        from normmatters.cli import main as run
    except ValueError as error:  # a setting of the environment that the package refuses
        raise SystemExit(f"Error: {error}") from None
    signal.signal(signal.SIGINT, heard)
    run()
