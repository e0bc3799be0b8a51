"""What a log quotes of others stays in its line."""

import logging
import sys

import pytest

from kvist_connector.log_lines import LineFormatter, plain


def line(message, trace=None):
    return LineFormatter().format(logging.LogRecord("kvist", logging.INFO, "", 1, message, None, trace))


@pytest.mark.parametrize("sign", ["\n", "\r", "\x1b[2J", "\x9b", "\0", "\u2028", "\u202e", "\ud800", "\x7f"])
def test_what_is_quoted_begins_no_line_and_moves_no_cursor(sign):
    told = line(f"redis: {sign}2026-01-01 INFO kvist: all is well")
    assert sign[0] not in told
    assert told.isprintable()
    told.encode()


def test_letters_of_every_script_stay_as_they_are():
    assert plain("Modell grön 模型 \u00e9") == "Modell grön 模型 \u00e9"


def test_a_trace_is_below_the_line():
    try:
        raise ValueError("wrong")
    except ValueError:
        lines = line("failed", sys.exc_info()).splitlines()
    assert lines[0].endswith("kvist: failed")
    assert lines[-1] == "ValueError: wrong"
